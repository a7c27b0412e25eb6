// kvasir chat: a conversation in the terminal. Ctrl-C stops the answer, not the program.
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <charconv>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
#include <utility>

#include "cli/chat_terminal.h"
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
    "  /exit           leave (Ctrl-D too, and Ctrl-C twice); Ctrl-C stops an answer\n"
    "  /help           this list\n"
    "A line that ends in \\ goes on, as does one after Alt-Return; what is pasted is one message. // begins a message "
    "with /.\n";

constexpr const char* kOnceMore = "Ctrl-C once more leaves; so do /exit and Ctrl-D.\n";

std::atomic<bool> answering{false};
std::atomic<int> interrupts{0};  // in a row, while nothing is answered

// What is to be said, or why it cannot be.
bool sayable(std::string_view text) {
  try {
    (void)nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    std::fputs("kvasir chat: the message is not UTF-8\n", stderr);
    return false;
  }
  if (text.find_first_not_of(" \t\r\n") != std::string_view::npos) return true;
  std::fputs("kvasir chat: the message is empty; say something, as an argument or on standard input\n", stderr);
  return false;
}

template <class T>
bool read_number(const std::string& text, T low, T high, T* out) {
  T value{};
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value >= low && value <= high)) return false;
  *out = value;
  return true;
}

class Conversation {
 public:
  Conversation(client::ChatClient& client, ChatConfig& config, const ChatTerminal* terminal)
      : client_(client), config_(config), terminal_(terminal) {
    clear();
  }

  void clear() {
    messages_.clear();
    unanswered_.clear();
    if (!config_.system.empty()) messages_.push_back({"system", config_.system});
  }

  // False when there was no answer to the end; the message is then taken back, and /retry asks it again.
  bool say(std::string text) {
    if (!sayable(text)) return false;
    messages_.push_back({"user", std::move(text)});
    client::TerminalText filter;
    bool read = true;  // by whoever reads what we print
    answering = true;
    auto reply = client_.chat(messages_, config_.settings(), [&](std::string_view piece) {
      std::string clean = filter.clean(piece);
      std::fwrite(clean.data(), 1, clean.size(), stdout);
      if (std::fflush(stdout) == 0 || !read) return;
      read = false;
      client_.cancel();
    });
    answering = false;
    std::putchar('\n');
    std::fflush(stdout);
    if (!reply.ok()) {
      std::fprintf(stderr, "kvasir chat: %s\n", reply.status().message().c_str());
      if (terminal_) std::fputs("The message is taken back; /retry says it again.\n", stderr);
      unanswered_ = std::move(messages_.back().content);
      messages_.pop_back();
      return false;
    }
    unanswered_.clear();
    if (terminal_) note_figures(*reply);
    messages_.push_back({"assistant", std::move(reply->text)});
    return read;
  }

  // False: leave.
  bool command(const std::string& line) {
    size_t space = line.find(' ');
    std::string name = line.substr(1, space - 1), value = space == std::string::npos ? "" : line.substr(space + 1);
    value.erase(value.find_last_not_of(" \t") + 1);
    if (name == "exit" || name == "quit" || name == "q") return false;
    if (name == "clear") {
      clear();
      std::fputs("forgotten\n", stderr);
    } else if (name == "system") {
      config_.system = value;
      clear();
      std::fputs(value.empty() ? "forgotten; no system message now\n" : "forgotten; the system message is set\n",
                 stderr);
    } else if (name == "temperature") {
      if (!read_number(value, 0.0, 100.0, &config_.temperature))
        std::fprintf(stderr, "/temperature takes a number from 0 to 100, not '%s'\n", shown(value).c_str());
    } else if (name == "max") {
      if (!read_number<int64_t>(value, 0, 1000000000, &config_.max_tokens))
        std::fprintf(stderr, "/max takes a whole number from 0 (up to the context), not '%s'\n", shown(value).c_str());
    } else if (name == "retry") {
      retry();
    } else if (name == "save") {
      save(value);
    } else if (name == "help") {
      std::fputs(kCommands, stderr);
    } else {
      std::fprintf(stderr, "there is no command /%s; /help lists them\n", shown(name).c_str());
    }
    return true;
  }

 private:
  static std::string shown(const std::string& text) { return client::TerminalText().clean(text.substr(0, 60)); }

  void note_figures(const client::ChatReply& reply) const {
    double after = reply.seconds - reply.first_token_seconds;
    char text[160];
    std::snprintf(text, sizeof text, "%lld tokens, first after %.2f s, then %.1f/s%s%s",
                  static_cast<long long>(reply.completion_tokens), reply.first_token_seconds,
                  after > 0 && reply.completion_tokens > 1 ? double(reply.completion_tokens - 1) / after : 0.0,
                  reply.reason == "LENGTH" ? "; cut at the longest" : "",
                  reply.reason == "CANCELLED" ? "; stopped" : "");
    terminal_->note(text);
  }
  void retry() {
    std::string text = std::exchange(unanswered_, {});
    if (text.empty()) {
      while (!messages_.empty() && messages_.back().role == "assistant") messages_.pop_back();
      if (messages_.empty() || messages_.back().role != "user") {
        std::fputs("nothing has been said yet\n", stderr);
        return;
      }
      text = std::move(messages_.back().content);
      messages_.pop_back();
    }
    say(std::move(text));
  }
  void save(const std::string& path) {
    if (path.empty()) {
      std::fputs("/save takes the name of a file\n", stderr);
      return;
    }
    using Json = nlohmann::ordered_json;
    std::ofstream file(path);
    for (const auto& m : messages_)
      file << Json{{"role", m.role}, {"content", m.content}}.dump(-1, ' ', false, Json::error_handler_t::replace)
           << '\n';
    file.close();
    std::fprintf(stderr, file ? "saved %s\n" : "cannot write '%s'\n", path.c_str());
  }

  client::ChatClient& client_;
  ChatConfig& config_;
  const ChatTerminal* const terminal_;  // null: nobody types
  std::vector<client::Message> messages_;
  std::string unanswered_;
};

void talk(Conversation& conversation, ChatTerminal& terminal, const std::string& model) {
  using Read = ChatTerminal::Read;
  std::fprintf(stderr, "%s. /help for commands, Ctrl-D to leave.\n", model.c_str());
  bool interrupted = false;
  for (std::string line;;) {
    std::fputc('\n', stderr);
    Read read = terminal.read("> ", line);
    if (read == Read::interrupt) {
      if (interrupted) return;
      interrupted = true;
      std::fputs(kOnceMore, stderr);
      continue;
    }
    interrupts = 0;
    interrupted = false;
    while (read == Read::line && !line.empty() && line.back() == '\\') {  // goes on
      line.back() = '\n';
      std::string more;
      read = terminal.read(". ", more);
      line += more;
    }
    if (read == Read::interrupt) continue;
    if (read == Read::end) return;
    if (line.find_first_not_of(" \t\n") == std::string::npos) continue;
    if (line[0] == '/' && !line.starts_with("//")) {
      if (!conversation.command(line)) return;
    } else {
      conversation.say(line.substr(line[0] == '/' ? 1 : 0));
    }
  }
}

// Signals are taken by a thread of their own, so that one may cancel a call (no handler could).
[[noreturn]] void watch_signals(const sigset_t& signals, client::ChatClient& client) {
  for (int signal = 0;;) {
    if (sigwait(&signals, &signal) != 0) continue;
    if (signal == SIGINT && answering) {
      client.cancel();
    } else if (signal == SIGINT && ++interrupts < 2) {
      std::fprintf(stderr, "\n%s", kOnceMore);
    } else {
      ChatTerminal::restore();
      std::fputc('\n', stderr);
      _exit(signal == SIGINT ? kOk : 128 + signal);
    }
  }
}

int converse(client::ChatClient& client, ChatConfig& config, ChatTerminal* terminal) {
  auto model = client.model(std::chrono::seconds(5));
  if (!model.ok()) {
    std::fprintf(stderr, "kvasir chat: no answer at %s: %s\n", config.target.address.c_str(),
                 model.status().message().c_str());
    return kFailed;
  }
  Conversation conversation(client, config, terminal);
  if (terminal) {
    talk(conversation, *terminal, *model);
    return kOk;
  }
  std::string text;
  for (const auto& word : config.message) text += (text.empty() ? "" : " ") + word;
  if (text.empty()) text.assign(std::istreambuf_iterator<char>(std::cin), {});
  return conversation.say(std::move(text)) ? kOk : kFailed;
}

int chat(int argc, char** argv) {
  ChatConfig config;
  Options options("kvasir chat", "Talks to a running server in the terminal.");
  config.define(options);
  if (auto code = options.parse(argc, argv)) return *code;
  const std::string& address = config.target.address;
  if (address.starts_with("http://") || address.starts_with("https://") || address.find(':') == std::string::npos) {
    std::fprintf(stderr, "kvasir chat: --server is '%s'; it must be HOST:PORT, of the server's gRPC port\n",
                 address.c_str());
    return kUsage;
  }
  // Blocked before any other thread is there to take them.
  sigset_t signals;
  sigemptyset(&signals);
  for (int signal : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&signals, signal);
  std::optional<ChatTerminal> terminal;
  if (config.message.empty() && isatty(STDIN_FILENO)) {
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);
    terminal.emplace();
  }
  auto client = client::ChatClient::create(config.target);
  if (!client.ok()) {
    std::fprintf(stderr, "kvasir chat: %s\n", client.status().message().c_str());
    return kFailed;
  }
  if (terminal) std::thread([&signals, &client] { watch_signals(signals, **client); }).detach();
  int code = converse(**client, config, terminal ? &*terminal : nullptr);
  std::fflush(stdout);
  if (!terminal) return code;
  ChatTerminal::restore();
  _exit(code);  // the thread above waits for a signal that will not come
}

}  // namespace

extern const Command chat_command;
const Command chat_command{"chat", "talk to a running server in the terminal", chat};

}  // namespace kvasir::cli
