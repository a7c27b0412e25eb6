// kvasir generate: prompts in, answers out, through the same engine as the server and without one.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <deque>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/command.h"
#include "cli/model_flags.h"

namespace kvasir::cli {
namespace {

using json = nlohmann::json;
using Clock = std::chrono::steady_clock;
constexpr int64_t kMostTokens = 1'000'000'000;  // of an answer

struct GenerateConfig {
  LogConfig log{.level = "warn"};
  ModelFlags model;
  std::vector<std::string> prompts, stop;
  std::string file, adapter;
  bool chat = false, as_json = false, ignore_eos = false;
  double temperature = 0, top_p = 1;
  int top_k = 0;
  int64_t max_tokens = 128, seed = 0;
  int rounds = 1;
  int beams = 0, best = 1;
  double length_penalty = 1;
  std::string early_stopping = "no";

  void define(Options& o) {
    o.positional("prompt", &prompts, "Each is a prompt; without any, standard input is one");
    o.section("Prompts");
    o.add("file", &file,
          "JSON lines with a \"prompt\" (and \"max_tokens\", \"seed\", \"adapter\", \"id\") each; - is standard input")
        .value_name("FILE");
    o.add("chat", &chat, "Put each prompt into the model's chat template, as a user's message");
    o.add("rounds", &rounds,
          "Ask everything so many times over; only the first answers are shown, and each round's figures: what a later "
          "one finds in the prefix cache, and what that saves")
        .range(1, 1000);
    o.section("Answers");
    o.add("max_tokens", &max_tokens, "Longest answer").range(0, double(kMostTokens));
    o.add("temperature", &temperature, "0 is greedy").range(0, 100);
    o.add("top_p", &top_p, "Nucleus sampling").range(0, 1);
    o.add("top_k", &top_k, "Draw among so many; 0: all").range(0, 1e6);
    o.add("seed", &seed, "The same seed gives the same answer").at_least(0);
    o.add("stop", &stop, "Text that ends an answer");
    o.add("beam_width", &beams, "Beam search with so many beams, instead of draws; 0: none").range(0, 1024);
    o.add("best", &best, "Answers of a beam search to show, the likeliest first, each with its score").range(1, 1024);
    o.add("length_penalty", &length_penalty,
          "A beam's score is its log-probability over its length to this power: above 0 favours longer answers")
        .range(-10, 10);
    o.add("early_stopping", &early_stopping,
          "A search ends when there are as many answers as beams (yes), when no beam is likelier for its length so far "
          "than the worst of them (no), or when none could become so (never)")
        .one_of({"no", "yes", "never"});
    o.add("ignore_eos", &ignore_eos, "Go on to --max-tokens whatever the model says");
    o.add("json", &as_json, "Answers as JSON lines, in the order of the prompts");
    o.add("adapter", &adapter, "Answer with this one of the adapters (lora); where there is one alone, with it")
        .value_name("NAME");
    model.engine.max_step_ms = 60000;  // nobody waits for each token; but what steps take is learned
    model.define(o);
    model.define_adapters(o);
    log.define(o);
    o.example("kvasir generate --model m.gguf 'Once upon a time'", "one prompt");
    o.example("kvasir generate --model m.gguf --chat 'Why is the sky blue?'", "as a conversation would put it");
    o.example("kvasir generate --model m.gguf --file prompts.jsonl --json > answers.jsonl", "many, batched");
    o.example("kvasir generate --model m.gguf --file prompts.jsonl --rounds 2",
              "and again: what the prefix cache saves");
    o.example("kvasir generate --model m.gguf --lora sql=./sql-adapter 'List the users'", "with a LoRA adapter");
    o.check([this]() -> Status {
      const auto& loaded = model.engine.adapters;
      if (adapter.empty() && loaded.size() == 1) adapter = loaded[0].name;
      if (adapter.empty() && loaded.size() > 1 && file.empty())
        return invalid_argument(cat("lora names ", loaded.size(),
                                    " adapters; say with --adapter which one answers, or in the lines of --file"));
      if (!adapter.empty() && std::none_of(loaded.begin(), loaded.end(), [&](auto& a) { return a.name == adapter; }))
        return invalid_argument(cat("adapter is '", adapter, "', which no --lora names"));
      if (model.model.model.empty())
        return invalid_argument("model is not set: --model FILE.gguf, a folder, or hf:ORG/REPO");
      if (best > std::max(1, beams))
        return invalid_argument(cat("best is ", best, "; a beam search of ", beams, " beams (beam_width) has at most ",
                                    "that many answers"));
      if (beams > 0 && temperature > 0)
        return invalid_argument(cat("temperature is ", temperature, "; beam search draws nothing: leave it out"));
      return {};
    });
  }
};

struct Item {
  std::string prompt;
  json id;  // of a line that has one; given back with its answer
  int64_t max_tokens = 0;
  uint64_t seed = 0;
  std::string adapter = {};
};

Result<std::vector<Item>> read_lines(std::istream& in, const GenerateConfig& c) {
  std::vector<Item> out;
  int number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    json j = json::parse(line, nullptr, false);
    if (j.is_object() && j.contains("custom_id"))
      return invalid_argument(cat("line ", number, " is a request of OpenAI's batch format: kvasir batch answers it"));
    if (!j.is_object() || !j.contains("prompt") || !j["prompt"].is_string())
      return invalid_argument(cat("line ", number, " is not a JSON object with a \"prompt\" string"));
    Item item{j["prompt"], j.value("id", json()), c.max_tokens, uint64_t(c.seed), c.adapter};
    for (auto& [key, value] : j.items()) {
      if (key == "prompt" || key == "id") continue;
      if (key == "adapter" && !value.is_string())
        return invalid_argument(cat("line ", number, ": \"adapter\" is not the name of one"));
      if (key == "adapter") {
        item.adapter = value;
        continue;
      }
      if (!value.is_number_unsigned() || (key != "max_tokens" && key != "seed"))
        return invalid_argument(cat("line ", number, ": \"", key, "\" is not max_tokens or seed with a whole number"));
      if (key == "max_tokens" && value.get<uint64_t>() > uint64_t(kMostTokens))
        return invalid_argument(
            cat("line ", number, ": max_tokens is ", value.dump(), "; it must be at most ", kMostTokens));
      if (key == "max_tokens") item.max_tokens = value;
      if (key == "seed") item.seed = value;
    }
    out.push_back(std::move(item));
  }
  return out;
}

Result<std::vector<Item>> read_prompts(const GenerateConfig& c) {
  std::vector<Item> out;
  for (const std::string& p : c.prompts) out.push_back({p, {}, c.max_tokens, uint64_t(c.seed), c.adapter});
  if (!c.file.empty() && c.file != "-") {
    std::ifstream in(c.file);
    if (!in) return not_found(cat("the prompt file ", c.file, " cannot be read"));
    KVASIR_ASSIGN(auto lines, read_lines(in, c));
    std::move(lines.begin(), lines.end(), std::back_inserter(out));
  } else if (c.file == "-") {
    KVASIR_ASSIGN(auto lines, read_lines(std::cin, c));
    std::move(lines.begin(), lines.end(), std::back_inserter(out));
  } else if (out.empty()) {
    out.push_back(
        {std::string(std::istreambuf_iterator<char>(std::cin), {}), {}, c.max_tokens, uint64_t(c.seed), c.adapter});
  }
  if (out.empty()) return invalid_argument("there is no prompt");
  return out;
}

Result<engine::Request> make_request(const GenerateConfig& c, const engine::Engine& engine, const Item& item) {
  engine::Request r;
  auto tokenizer = engine.tokenizer();
  if (!tokenizer) return failed_precondition("this model has no tokenizer");
  std::string text = item.prompt;
  if (c.chat) {
    auto chat_template = engine.chat_template();
    if (!chat_template) return failed_precondition("this model has no chat template; leave out --chat");
    json messages = json::array({{{"role", "user"}, {"content", item.prompt}}});
    KVASIR_ASSIGN(text, chat_template->render(messages.dump(), "", true));
  }
  KVASIR_ASSIGN(r.prompt, tokenizer->encode(text, !c.chat, c.chat));
  r.adapter = item.adapter;
  r.max_tokens = item.max_tokens;
  r.sampling.temperature = float(c.temperature);
  r.sampling.top_p = float(c.top_p);
  r.sampling.top_k = c.top_k;
  r.sampling.seed = item.seed;
  r.stop_strings = c.stop;
  r.ignore_eos = c.ignore_eos;
  if (c.beams > 0) {
    using Early = engine::BeamOptions::Early;
    r.beams = {c.beams, float(c.length_penalty),
               c.early_stopping == "yes"     ? Early::yes
               : c.early_stopping == "never" ? Early::never
                                             : Early::no};
    r.n = c.best;
  }
  return r;
}

struct Beam {
  std::string text;
  float score = 0;
  const char* reason = "";
};

struct Answer {
  Status failed;
  std::string text;
  std::vector<Beam> beams;                 // of a search, the best first
  std::optional<Clock::time_point> first;  // token
  engine::Usage usage;
  const char* reason = "";
};

const char* reason_name(engine::FinishReason reason) {
  switch (reason) {
    case engine::FinishReason::length: return "length";
    case engine::FinishReason::cancelled: return "cancelled";
    default: return "stop";
  }
}

// A model may say a zero byte, too.
void write_text(const std::string& text) { (void)std::fwrite(text.data(), 1, text.size(), stdout); }

// Reads one answer to its end; with `live`, writes it as it comes.
Answer finish(engine::Stream& stream, bool live) {
  Answer out;
  std::vector<std::string> texts(1);
  while (auto event = stream.next()) {
    if (auto* tokens = std::get_if<engine::Tokens>(&*event)) {
      if (!out.first) out.first = Clock::now();
      if (texts.size() <= size_t(tokens->choice)) texts.resize(size_t(tokens->choice) + 1);
      texts[size_t(tokens->choice)] += tokens->text;
      if (live) write_text(tokens->text), std::fflush(stdout);
    } else if (auto* finished = std::get_if<engine::Finished>(&*event)) {
      out.usage = finished->usage;
      out.reason = reason_name(finished->reason);
      if (finished->score) out.beams.push_back({{}, *finished->score, out.reason});
    } else if (auto* f = std::get_if<engine::Failed>(&*event)) {
      out.failed = f->status;
    }
  }
  out.text = texts[0];
  texts.resize(std::max(texts.size(), out.beams.size()));
  for (size_t i = 0; i < out.beams.size(); ++i) out.beams[i].text = texts[i];
  return out;
}

void print_answer(const GenerateConfig& c, const Item& item, const Answer& answer) {
  if (!answer.failed.ok() && c.as_json) {
    json j{{"prompt", item.prompt}, {"error", answer.failed.message()}};
    if (!item.id.is_null()) j["id"] = item.id;
    std::printf("%s\n", j.dump(-1, ' ', false, json::error_handler_t::replace).c_str());
    return;
  }
  if (!answer.failed.ok()) return;  // one_round has said why
  if (!c.as_json && !answer.beams.empty()) {
    for (const Beam& b : answer.beams) write_text(cat(b.score, '\t', item.prompt, b.text, '\n'));
    return;
  }
  if (!c.as_json) {
    write_text(item.prompt + answer.text + '\n');
    return;
  }
  json j{{"prompt", item.prompt},
         {"text", answer.text},
         {"finish_reason", answer.reason},
         {"prompt_tokens", answer.usage.prompt_tokens},
         {"completion_tokens", answer.usage.completion_tokens}};
  for (const Beam& b : answer.beams)
    j["beams"].push_back({{"text", b.text}, {"score", b.score}, {"finish_reason", b.reason}});
  if (!item.id.is_null()) j["id"] = item.id;
  std::printf("%s\n", j.dump(-1, ' ', false, json::error_handler_t::replace).c_str());
}

// A prompt that cannot be asked fails alone.
std::unique_ptr<engine::Stream> ask(const GenerateConfig& c, engine::Engine& engine, const Item& item, Status& failed) {
  auto request = make_request(c, engine, item);
  failed = request.status();
  if (!failed.ok()) return nullptr;
  auto stream = engine.submit(std::move(*request));
  failed = stream.status();
  return failed.ok() ? std::move(*stream) : nullptr;
}

// Asks everything once, so many at a time as the engine runs and as many waiting; `show` writes the answers.
Status one_round(const GenerateConfig& c, engine::Engine& engine, const std::vector<Item>& items, size_t window,
                 bool show) {
  const bool one = items.size() == 1 && !c.as_json && c.beams == 0, progress = !one && isatty(STDERR_FILENO);
  std::deque<std::pair<std::unique_ptr<engine::Stream>, Status>> open;
  size_t failures = 0;
  engine::Usage sum;
  std::optional<Clock::time_point> first;
  auto began = Clock::now();
  for (size_t sent = 0, done = 0; done < items.size(); ++done) {
    for (; sent < items.size() && open.size() < window; ++sent) {
      Status failed;
      auto stream = ask(c, engine, items[sent], failed);
      open.emplace_back(std::move(stream), std::move(failed));
    }
    auto [stream, refused] = std::move(open.front());
    open.pop_front();
    Answer answer;
    if (stream)
      answer = finish(*stream, one && show);
    else
      answer.failed = std::move(refused);
    if (!answer.failed.ok()) {
      if (one) return answer.failed;
      ++failures;
      std::fprintf(stderr, "kvasir generate: prompt %zu: %s\n", done + 1, answer.failed.message().c_str());
    }
    if (!first) first = answer.first;
    sum.prompt_tokens += answer.usage.prompt_tokens;
    sum.cached_tokens += answer.usage.cached_tokens;
    sum.completion_tokens += answer.usage.completion_tokens;
    sum.drafted += answer.usage.drafted;
    sum.accepted += answer.usage.accepted;
    if (show && !one) print_answer(c, items[done], answer);
    if (progress) std::fprintf(stderr, "\r%zu of %zu", done + 1, items.size());
  }
  if (one && show) std::putchar('\n');
  std::fflush(stdout);
  const auto seconds = [&](Clock::time_point at) { return std::chrono::duration<double>(at - began).count(); };
  const double all = seconds(Clock::now());
  std::fprintf(stderr, "%s%lld prompt and %lld output tokens in %.2f s: %.1f output tokens a second\n",
               progress ? "\n" : "", static_cast<long long>(sum.prompt_tokens),
               static_cast<long long>(sum.completion_tokens), all, double(sum.completion_tokens) / all);
  if (sum.drafted > 0)
    std::fprintf(stderr, "  %lld of %lld draft tokens were accepted\n", static_cast<long long>(sum.accepted),
                 static_cast<long long>(sum.drafted));
  if (c.rounds > 1) {
    std::fprintf(stderr, "  %lld of the prompt tokens were cached; the first token came after %.1f ms\n",
                 static_cast<long long>(sum.cached_tokens), first ? seconds(*first) * 1e3 : 0);
  }
  if (failures > 0) return invalid_argument(cat(failures, " of ", items.size(), " prompts have no answer"));
  return {};
}

Status generate_with(GenerateConfig& c) {
  KVASIR_ASSIGN(const auto items, read_prompts(c));
  KVASIR_TRY(c.model.fetch());
  engine::EngineOptions options = c.model.engine_options();
  options.event_buffer = 1 << 20;  // the reader is this loop: nobody is slow, answers are read in order
  options.max_wait = std::chrono::hours(24);
  auto engine = engine::Engine::start(c.model.runner_options(), options);
  KVASIR_TRY(engine->wait_ready());
  for (int round = 0; round < c.rounds; ++round) {
    KVASIR_TRY(one_round(c, *engine, items, size_t(options.max_running) * 2, round == 0));
  }
  return {};
}

int generate(int argc, char** argv) {
  GenerateConfig config;
  Options options("kvasir generate", "Answers prompts on this machine, without a server.");
  config.define(options);
  if (auto code = options.parse(argc, argv)) return *code;
  log_start(config.log);
  Status status = generate_with(config);
  if (!status.ok()) std::fprintf(stderr, "kvasir generate: %s\n", status.message().c_str());
  log_stop();
  return status.ok() ? kOk : kFailed;
}

}  // namespace

extern const Command generate_command;
const Command generate_command{"generate", "answer prompts without a server", generate};

}  // namespace kvasir::cli
