// kvasir embed: texts in, vectors out, through the same engine as the server and without one.
#include <chrono>
#include <cstdio>
#include <deque>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/model_flags.h"

namespace kvasir::cli {
namespace {

using json = nlohmann::json;

struct EmbedConfig {
  LogConfig log{.level = "warn"};
  ModelFlags model;
  std::vector<std::string> texts;
  std::string file;
  int64_t dimensions = 0;

  void define(Options& o) {
    o.positional("text", &texts, "Each is a text; without any, each line of standard input is one");
    o.section("Texts");
    o.add("file", &file, "A text a line; - is standard input").value_name("FILE");
    o.add("dimensions", &dimensions, "So many numbers of each vector, normalized anew; 0: all").at_least(0);
    model.define(o);
    log.define(o);
    o.example("kvasir embed --model m.gguf 'a text' 'another'", "a JSON line for each");
    o.example("kvasir embed --model m.gguf --pooling mean --file texts.txt > vectors.jsonl", "many, batched");
    o.check([this]() -> Status {
      if (model.model.model.empty())
        return invalid_argument("model is not set: --model FILE.gguf, a folder, or hf:ORG/REPO");
      return {};
    });
  }
};

void add_lines(std::istream& in, std::vector<std::string>& out) {
  for (std::string line; std::getline(in, line);)
    if (!line.empty()) out.push_back(std::move(line));
}

Result<engine::Request> make_request(const EmbedConfig& c, const engine::Engine& engine, const std::string& text) {
  auto tokenizer = engine.tokenizer();
  if (!tokenizer) return failed_precondition("this model has no tokenizer");
  engine::Request r;
  KVASIR_ASSIGN(r.prompt, tokenizer->encode(text, true, false));
  r.pooled = true;
  r.max_tokens = 0;
  r.detokenize = false;
  if (c.dimensions > 0) r.dimensions = c.dimensions;
  return r;
}

Status print(const std::string& text, engine::Stream& stream, int64_t* tokens) {
  while (auto event = stream.next()) {
    if (auto* failed = std::get_if<engine::Failed>(&*event)) return failed->status;
    auto* done = std::get_if<engine::Finished>(&*event);
    if (!done) continue;
    const json line{{"text", text}, {"prompt_tokens", done->usage.prompt_tokens}, {"embedding", done->pooled.at(0)}};
    std::printf("%s\n", line.dump(-1, ' ', false, json::error_handler_t::replace).c_str());
    *tokens += done->usage.prompt_tokens;
  }
  return {};
}

Status embed_with(EmbedConfig& c) {
  if (!c.file.empty() && c.file != "-") {
    std::ifstream in(c.file);
    if (!in) return not_found(cat("the file ", c.file, " cannot be read"));
    add_lines(in, c.texts);
  } else if (c.file == "-" || c.texts.empty()) {
    add_lines(std::cin, c.texts);
  }
  if (c.texts.empty()) return invalid_argument("there is no text");
  KVASIR_TRY(c.model.fetch());
  engine::EngineOptions options = c.model.engine_options();
  options.max_wait = std::chrono::hours(24);
  if (!options.draft_model.empty())
    return invalid_argument(cat("draft_model is ", options.draft_model, "; embeddings have no answer to draft"))
        .with_field("draft_model");
  options.mtp = false;
  auto engine = engine::Engine::start(c.model.runner_options(), options);
  KVASIR_TRY(engine->wait_ready());
  const auto began = std::chrono::steady_clock::now();
  int64_t tokens = 0;
  std::deque<std::unique_ptr<engine::Stream>> open;
  for (size_t asked = 0, done = 0; done < c.texts.size(); ++done) {
    for (; asked < c.texts.size() && open.size() < size_t(options.max_running) * 2; ++asked) {
      KVASIR_ASSIGN(engine::Request request, make_request(c, *engine, c.texts[asked]));
      KVASIR_ASSIGN(open.emplace_back(), engine->submit(std::move(request)));
    }
    KVASIR_TRY(print(c.texts[done], *open.front(), &tokens));
    open.pop_front();
  }
  std::fflush(stdout);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  std::fprintf(stderr, "%zu texts of %lld tokens in %.2f s: %.1f texts and %.0f tokens a second\n", c.texts.size(),
               static_cast<long long>(tokens), seconds, double(c.texts.size()) / seconds, double(tokens) / seconds);
  return {};
}

int embed(int argc, char** argv) {
  EmbedConfig config;
  Options options("kvasir embed", "Makes vectors of texts on this machine, without a server.");
  config.define(options);
  if (auto code = options.parse(argc, argv)) return *code;
  log_start(config.log);
  Status status = embed_with(config);
  if (!status.ok()) std::fprintf(stderr, "kvasir embed: %s\n", status.message().c_str());
  log_stop();
  return status.ok() ? kOk : kFailed;
}

}  // namespace

extern const Command embed_command;
const Command embed_command{"embed", "make vectors of texts without a server", embed};

}  // namespace kvasir::cli
