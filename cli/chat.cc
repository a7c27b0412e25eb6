// kvasir chat: a conversation in the terminal. Ctrl-C stops the answer, not the program.
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <thread>

#include "cli/command.h"
#include "client/chat_client.h"
#include "client/terminal_text.h"
#include "core/config.h"

namespace kvasir::cli {
namespace {

struct ChatConfig {
  client::ChatTarget target;
  std::string system;
  double temperature = -1, top_p = -1;
  int64_t max_tokens = 0, seed = -1;
  std::vector<std::string> message;

  void define(Options& o) {
    o.positional("message", &message, "Say this, print the answer and leave; without it, a conversation");
    o.section("Server");
    o.add("server", &target.address, "Its gRPC address").value_name("HOST:PORT");
    o.add("key", &target.key, "API key, when the server asks for one").secret();
    o.add("tls", &target.tls.on, "Speak TLS, trusting the system's authorities");
    o.add("tls_ca", &target.tls.ca, "Speak TLS, trusting this authority (PEM)").value_name("FILE");
    o.add("tls_cert", &target.tls.cert, "Our certificate, for a server that asks for one (PEM)").value_name("FILE");
    o.add("tls_key", &target.tls.key, "Its private key (PEM)").value_name("FILE");
    o.section("Answers");
    o.add("system", &system, "What the model is told before everything else");
    o.add("temperature", &temperature, "0 is greedy; -1 leaves it to the server").range(-1, 100);
    o.add("top_p", &top_p, "Nucleus sampling; -1 leaves it to the server").range(-1, 1);
    o.add("max_tokens", &max_tokens, "Longest answer; 0 is up to the context").range(0, 1e9);
    o.add("seed", &seed, "The same seed gives the same answer; -1 draws one").at_least(-1);
    o.example("kvasir chat", "talk to the server of this machine; /help says what else there is");
    o.example("kvasir chat 'Why is the sky blue?'", "one question, one answer");
    o.example("kvasir chat --system 'Answer in French.' < question.txt", "the question from a file");
  }
  client::ChatSettings settings() const {
    client::ChatSettings s;
    if (temperature >= 0) s.temperature = temperature;
    if (top_p >= 0) s.top_p = top_p;
    if (max_tokens > 0) s.max_tokens = max_tokens;
    if (seed >= 0) s.seed = uint64_t(seed);
    return s;
  }
};

constexpr const char* kCommands =
    "  /clear          forget the conversation\n"
    "  /retry          another answer to the last message\n"
    "  /system TEXT    what the model is told before everything else; clears\n"
    "  /temperature X  how freely it draws; 0 is greedy\n"
    "  /max N          longest answer in tokens; 0 is up to the context\n"
    "  /save FILE      write the conversation as JSON lines\n"
    "  /exit           leave (Ctrl-D too); Ctrl-C stops an answer\n";

std::string json_string(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    char escaped[8];
    if (c == '"' || c == '\\') {
      out += '\\', out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      std::snprintf(escaped, sizeof escaped, "\\u%04x", c);
      out += escaped;
    } else {
      out += c;
    }
  }
  return out + '"';
}

class Conversation {
 public:
  Conversation(client::ChatClient& client, ChatConfig& config) : client_(client), config_(config) { clear(); }

  void clear() {
    messages_.clear();
    if (!config_.system.empty()) messages_.push_back({"system", config_.system});
  }

  // False when the server refused; the message is then taken back.
  bool say(std::string text, bool figures) {
    messages_.push_back({"user", std::move(text)});
    client::TerminalText filter;
    auto reply = client_.chat(messages_, config_.settings(), [&](std::string_view piece) {
      std::string clean = filter.clean(piece);
      std::fwrite(clean.data(), 1, clean.size(), stdout);
      std::fflush(stdout);
    });
    std::putchar('\n');
    std::fflush(stdout);
    if (!reply.ok()) {
      std::fprintf(stderr, "kvasir chat: %s\n", reply.status().message().c_str());
      messages_.pop_back();
      return false;
    }
    if (figures) {
      double after = reply->seconds - reply->first_token_seconds;
      std::fprintf(stderr, "\033[2m%lld tokens, first after %.2f s, then %.1f/s%s%s\033[0m\n",
                   static_cast<long long>(reply->completion_tokens), reply->first_token_seconds,
                   after > 0 && reply->completion_tokens > 1 ? double(reply->completion_tokens - 1) / after : 0.0,
                   reply->reason == "LENGTH" ? "; cut at the longest" : "",
                   reply->reason == "CANCELLED" ? "; stopped" : "");
    }
    messages_.push_back({"assistant", std::move(reply->text)});
    return true;
  }

  // False: leave.
  bool command(const std::string& line) {
    size_t space = line.find(' ');
    std::string name = line.substr(1, space - 1), value = space == std::string::npos ? "" : line.substr(space + 1);
    if (name == "exit" || name == "quit" || name == "q") return false;
    if (name == "clear") {
      clear();
    } else if (name == "system") {
      config_.system = value;
      clear();
    } else if (name == "temperature") {
      config_.temperature = std::atof(value.c_str());
    } else if (name == "max") {
      config_.max_tokens = std::atoll(value.c_str());
    } else if (name == "retry") {
      retry();
    } else if (name == "save") {
      save(value);
    } else {
      std::fputs(kCommands, stderr);
    }
    return true;
  }

 private:
  void retry() {
    while (!messages_.empty() && messages_.back().role == "assistant") messages_.pop_back();
    if (messages_.empty() || messages_.back().role != "user") {
      std::fprintf(stderr, "nothing has been said yet\n");
      return;
    }
    std::string text = std::move(messages_.back().content);
    messages_.pop_back();
    say(std::move(text), true);
  }
  void save(const std::string& path) {
    std::ofstream file(path);
    for (const auto& m : messages_)
      file << "{\"role\":" << json_string(m.role) << ",\"content\":" << json_string(m.content) << "}\n";
    file.close();
    std::fprintf(stderr, file ? "saved %s\n" : "cannot write '%s'\n", path.c_str());
  }

  client::ChatClient& client_;
  ChatConfig& config_;
  std::vector<client::Message> messages_;
};

void talk(Conversation& conversation, const std::string& model) {
  std::fprintf(stderr, "%s. /help for commands, Ctrl-D to leave.\n", model.c_str());
  for (std::string line;;) {
    std::fputs("\n> ", stderr);
    if (!std::getline(std::cin, line)) break;
    while (!line.empty() && line.back() == '\\') {  // goes on
      line.back() = '\n';
      std::string more;
      std::fputs(". ", stderr);
      if (!std::getline(std::cin, more)) break;
      line += more;
    }
    if (line.find_first_not_of(" \t\n") == std::string::npos) continue;
    if (line[0] == '/') {
      if (!conversation.command(line)) return;
    } else {
      conversation.say(line, true);
    }
  }
  std::fputc('\n', stderr);
}

int chat_with(client::ChatClient& client, ChatConfig& config) {
  auto model = client.model(std::chrono::seconds(5));
  if (!model.ok()) {
    std::fprintf(stderr, "kvasir chat: no answer at %s: %s\n", config.target.address.c_str(),
                 model.status().message().c_str());
    return kFailed;
  }
  Conversation conversation(client, config);
  if (!config.message.empty() || !isatty(STDIN_FILENO)) {
    std::string text;
    for (const auto& word : config.message) text += (text.empty() ? "" : " ") + word;
    if (text.empty()) text.assign(std::istreambuf_iterator<char>(std::cin), {});
    return conversation.say(std::move(text), false) ? kOk : kFailed;
  }
  talk(conversation, *model);
  return kOk;
}

int chat(int argc, char** argv) {
  ChatConfig config;
  Options options("kvasir chat", "Talks to a running server in the terminal.");
  config.define(options);
  if (auto code = options.parse(argc, argv)) return *code;
  // Ctrl-C is taken by a thread of its own, so that it may cancel a call (no handler could); and it is blocked
  // before any other thread is there to take it.
  sigset_t interrupt;
  sigemptyset(&interrupt);
  sigaddset(&interrupt, SIGINT);
  bool conversation = config.message.empty() && isatty(STDIN_FILENO);
  if (conversation) pthread_sigmask(SIG_BLOCK, &interrupt, nullptr);
  auto client = client::ChatClient::create(config.target);
  if (!client.ok()) {
    std::fprintf(stderr, "kvasir chat: %s\n", client.status().message().c_str());
    return kFailed;
  }
  if (conversation)
    std::thread([&interrupt, &client] {
      for (int signal; sigwait(&interrupt, &signal) == 0;) (*client)->cancel();
    }).detach();
  int code = chat_with(**client, config);
  std::fflush(stdout);
  if (conversation) _exit(code);  // the thread above waits for a signal that will not come
  return code;
}

}  // namespace

extern const Command chat_command;
const Command chat_command{"chat", "talk to a running server in the terminal", chat};

}  // namespace kvasir::cli
