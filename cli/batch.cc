// kvasir batch: requests in OpenAI's batch format, answered by the server's own handlers without a server.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "cli/command.h"
#include "cli/model_flags.h"
#include "model/generation_config.h"
#include "server/http/api.h"

namespace kvasir::cli {
namespace {

using json = nlohmann::ordered_json;
using server::http::HttpRequest;
using server::http::HttpResponse;
using server::http::Producer;

constexpr std::array<std::string_view, 7> kUrls = {
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
    "/v1/embeddings",       "/v1/rerank",      "/v1/score"};

struct BatchConfig {
  LogConfig log{.level = "warn"};
  ModelFlags model;
  server::ServerOptions server;
  std::vector<std::string> files;
  std::string output;
  bool again = false;

  void define(Options& o) {
    o.positional("file", &files,
                 "Requests, a line each: {\"custom_id\":..,\"method\":\"POST\",\"url\":..,\"body\":{..}}");
    o.section("Answers");
    o.add(
         "output", &output,
         "Answers, a line each as they come. Requests that it has answers of are not asked again: run the same command "
         "to go on with what was stopped. Beside the requests, .answers.jsonl, when not given")
        .value_name("FILE");
    o.add("again", &again, "Forget the answers that the output has");
    o.add("any_model_name", &server.any_model_name,
          "Answer requests whatever they call the model; else other names are refused");
    model.engine.max_step_ms = 60000;  // nobody waits for each token
    model.define(o);
    model.define_adapters(o);
    log.define(o);
    o.example("kvasir batch --model m.gguf requests.jsonl", "answers in requests.answers.jsonl");
    o.example("kvasir batch --model m.gguf --any-model-name requests.jsonl --output a.jsonl",
              "of another model's file");
    o.check([this]() -> Status {
      if (files.size() != 1) return invalid_argument(cat("one file of requests is taken, not ", files.size()));
      if (model.model.model.empty())
        return invalid_argument("model is not set: --model FILE.gguf, a folder, or hf:ORG/REPO");
      if (output.empty()) output = std::filesystem::path(files[0]).replace_extension(".answers.jsonl").string();
      return {};
    });
  }
};

struct Line {
  std::string id, url, body;
};

// One request of the file, or what is wrong with it.
Result<Line> parse_line(const std::string& text) {
  const json j = json::parse(text, nullptr, false);
  if (!j.is_object()) return invalid_argument("it is not a JSON object");
  Line line;
  for (const auto& [key, value] : j.items()) {
    std::string* to = key == "custom_id" ? &line.id : key == "url" ? &line.url : nullptr;
    if (to && value.is_string())
      *to = value.get<std::string>();
    else if (to)
      return invalid_argument(cat(key, " must be a string"));
    else if (key == "method" && value != "POST")
      return invalid_argument("method must be \"POST\"");
    else if (key != "method" && key != "body")
      return invalid_argument(cat('"', key, "\" is none of custom_id, method, url and body"));
  }
  if (line.id.empty()) return invalid_argument("custom_id is missing: the answer is found by it");
  if (std::find(kUrls.begin(), kUrls.end(), line.url) == kUrls.end()) {
    std::string all;
    for (std::string_view url : kUrls) all += cat(all.empty() ? "" : ", ", url);
    return invalid_argument(cat("url is '", line.url, "'; it must be one of ", all));
  }
  const auto body = j.find("body");
  if (body == j.end() || !body->is_object()) return invalid_argument("body must be an object");
  if (body->value("stream", json()) == json(true)) return invalid_argument("stream is true; a batch has whole answers");
  line.body = body->dump();
  return line;
}

template <class F>
Status each_line(const std::string& path, F&& f) {
  std::ifstream in(path);
  if (!in) return not_found(cat("the file ", path, " cannot be read"));
  int64_t number = 0;
  for (std::string text; std::getline(in, text);) {
    ++number;
    if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
    Status status = f(text);
    if (!status.ok()) return invalid_argument(cat(path, ", line ", number, ": ", status.message()));
  }
  return {};
}

// Every request is read before the first is asked: a mistake in the last line shows now, not after a night.
Result<int64_t> check_requests(const std::string& path) {
  std::unordered_set<std::string> ids;
  KVASIR_TRY(each_line(path, [&](const std::string& text) -> Status {
    KVASIR_ASSIGN(Line line, parse_line(text));
    if (!ids.insert(line.id).second) return invalid_argument(cat("custom_id '", line.id, "' is an earlier line's"));
    return {};
  }));
  if (ids.empty()) return invalid_argument(cat(path, " has no request"));
  return int64_t(ids.size());
}

// What has been answered. A last line that was not written whole is cut off.
Result<std::unordered_set<std::string>> answered(const std::string& path) {
  std::unordered_set<std::string> ids;
  std::error_code none;
  const auto size = std::filesystem::file_size(path, none);
  if (none) return ids;
  std::ifstream in(path);
  if (!in) return not_found(cat("the output ", path, " cannot be read"));
  uintmax_t whole = 0;
  for (std::string text; std::getline(in, text) && !in.eof(); whole += text.size() + 1) {
    const json j = json::parse(text, nullptr, false);
    if (!j.is_object() || !j.contains("custom_id") || !j["custom_id"].is_string())
      return invalid_argument(cat(path, " is no output of a batch: \"", text.substr(0, 60),
                                  "\" has no custom_id. Name another output, or say --again to write over it"));
    ids.insert(j["custom_id"].get<std::string>());
  }
  if (whole < size) std::filesystem::resize_file(path, whole, none);
  if (none) return failed_precondition(cat("the output ", path, " cannot be written: ", none.message()));
  return ids;
}

// Answers that have something to be read.
class Ready {
 public:
  void add(int64_t call) {
    {
      std::lock_guard lock(mutex_);
      calls_.push_back(call);
    }
    some_.notify_one();
  }
  std::deque<int64_t> wait() {
    std::unique_lock lock(mutex_);
    some_.wait(lock, [&] { return !calls_.empty(); });
    return std::exchange(calls_, {});
  }

 private:
  std::mutex mutex_;
  std::condition_variable some_;
  std::deque<int64_t> calls_;
};

class BatchRun {
 public:
  BatchRun(server::Services& services, std::FILE* out, int64_t all)
      : api_(services), out_(out), all_(all), progress_(isatty(STDERR_FILENO)) {}

  void ask(const Line& line) {
    const int64_t number = ++asked_;
    const HttpRequest request{.method = "POST",
                              .path = line.url,
                              .headers = {{"host", "localhost"}, {"content-type", "application/json"}},
                              .body = line.body,
                              .peer = "localhost"};
    server::http::Reply reply = answer(request);
    // Many answers to one request may be more than there is room for beside others.
    while (busy(reply) && !open_.empty()) {
      wait(open_.size() - 1);
      reply = answer(request);
    }
    if (auto* whole = std::get_if<HttpResponse>(&reply)) return write(line.id, number, *whole, whole->body);
    Call& call = open_[number];
    call = {line.id, std::get<std::unique_ptr<Producer>>(std::move(reply)), {}};
    call.producer->on_ready([this, number] { ready_.add(number); });
    ready_.add(number);
  }

  // Until at most so many are on their way.
  void wait(size_t most) {
    while (open_.size() > most)
      for (int64_t number : ready_.wait()) read(number);
  }

  int64_t done() const { return done_; }
  int64_t refused() const { return refused_; }
  int64_t tokens() const { return tokens_; }

 private:
  struct Call {
    std::string id;
    std::unique_ptr<Producer> producer;
    std::string body;
  };

  server::http::Reply answer(const HttpRequest& request) {
    server::http::Admission admission = api_.admit(request);
    if (admission.refusal) return *std::move(admission.refusal);
    return admission.answer(request);
  }

  static bool busy(const server::http::Reply& reply) {
    const auto* whole = std::get_if<HttpResponse>(&reply);
    return whole && (whole->status == 429 || whole->status == 503);
  }

  void read(int64_t number) {
    const auto found = open_.find(number);
    if (found == open_.end()) return;  // said twice
    Call& call = found->second;
    const Producer::Progress progress = call.producer->poll();
    call.body += call.producer->take();
    if (progress != Producer::Progress::done) return;
    write(call.id, number, call.producer->head(), call.body);
    open_.erase(found);
  }

  void write(const std::string& id, int64_t number, const HttpResponse& head, const std::string& text) {
    json body = json::parse(text, nullptr, false);
    if (body.is_discarded()) body = text;
    if (head.status != 200) ++refused_;
    if (body.is_object() && body.contains("usage") && body["usage"].is_object())
      for (const char* name : {"completion_tokens", "output_tokens"})
        if (auto it = body["usage"].find(name); it != body["usage"].end() && it->is_number_integer())
          tokens_ += it->get<int64_t>();
    std::string request_id;
    for (const auto& [name, value] : head.headers)
      if (name == "X-Request-Id") request_id = value;
    const json answer{
        {"id", cat("batch_req_", number)},
        {"custom_id", id},
        {"response", {{"status_code", head.status}, {"request_id", request_id}, {"body", std::move(body)}}},
        {"error", nullptr}};
    std::fprintf(out_, "%s\n", answer.dump(-1, ' ', false, json::error_handler_t::replace).c_str());
    std::fflush(out_);
    ++done_;
    if (progress_) std::fprintf(stderr, "\r%lld of %lld", static_cast<long long>(done_), static_cast<long long>(all_));
  }

  server::http::Api api_;
  std::FILE* out_;
  const int64_t all_;
  const bool progress_;
  Ready ready_;
  std::map<int64_t, Call> open_;
  int64_t asked_ = 0, done_ = 0, refused_ = 0, tokens_ = 0;
};

Status batch_with(BatchConfig& c) {
  KVASIR_ASSIGN(const int64_t all, check_requests(c.files[0]));
  std::unordered_set<std::string> before;
  if (!c.again) {
    KVASIR_ASSIGN(before, answered(c.output));
  }
  KVASIR_TRY(c.model.fetch());
  KVASIR_ASSIGN(const model::GenerationConfig said, model::read_generation_config(c.model.model.model));
  c.server.sampling = said.sampling, c.server.sampling_json = said.sampling_json();
  c.server.access_log = false;
  c.server.host = "127.0.0.1";
  c.server.model_path = c.model.model.model;
  engine::EngineOptions options = c.model.engine_options();
  options.event_buffer = 1 << 20;  // nobody is slow here
  options.max_wait = std::chrono::hours(24);
  auto engine = engine::Engine::start(c.model.runner_options(), options);
  KVASIR_TRY(engine->wait_ready());
  KVASIR_ASSIGN(auto services, server::Services::create(c.server, *engine));

  std::FILE* out = std::fopen(c.output.c_str(), c.again ? "w" : "a");
  if (!out) return failed_precondition(cat("the output ", c.output, " cannot be written"));
  const auto began = std::chrono::steady_clock::now();
  BatchRun batch(*services, out, all - int64_t(before.size()));
  // As many run as the engine has room for, and as many wait.
  const size_t window = size_t(options.max_running) * 2;
  Status status = each_line(c.files[0], [&](const std::string& text) -> Status {
    KVASIR_ASSIGN(const Line line, parse_line(text));
    if (before.contains(line.id)) return {};
    batch.ask(line);
    batch.wait(window - 1);
    return {};
  });
  batch.wait(0);
  const bool written = std::ferror(out) == 0;
  if (std::fclose(out) != 0 || !written) return failed_precondition(cat("not all of ", c.output, " could be written"));
  KVASIR_TRY(status);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  std::fprintf(stderr, "%s%lld answers in %s%s: %lld output tokens in %.2f s\n", isatty(STDERR_FILENO) ? "\n" : "",
               static_cast<long long>(batch.done()), c.output.c_str(),
               before.empty() ? "" : cat(" (", before.size(), " were there)").c_str(),
               static_cast<long long>(batch.tokens()), seconds);
  if (batch.refused() > 0)
    return invalid_argument(cat(batch.refused(), " of ", batch.done(), " requests were refused: their lines say why"));
  return {};
}

int batch(int argc, char** argv) {
  BatchConfig config;
  Options options("kvasir batch", "Answers a file of requests in OpenAI's batch format, without a server.");
  config.define(options);
  if (auto code = options.parse(argc, argv)) return *code;
  log_start(config.log);
  Status status = batch_with(config);
  if (!status.ok()) std::fprintf(stderr, "kvasir batch: %s\n", status.message().c_str());
  log_stop();
  return status.ok() ? kOk : kFailed;
}

}  // namespace

extern const Command batch_command;
const Command batch_command{"batch", "answer a file of requests in OpenAI's batch format", batch};

}  // namespace kvasir::cli
