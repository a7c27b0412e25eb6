// A server under load, whatever it speaks. start() never blocks; what happens is told to the Sink, from the
// target's own threads, one call at a time for each request.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace kvasir::client {

struct Ask {
  std::string prompt;
  int max_tokens = 128;
  bool ignore_eos = true;
  double temperature = 0;
  std::optional<uint64_t> seed;
  bool top_two = false;  // log-probabilities of the two likeliest tokens, where the contract has them
};

struct Usage {
  int64_t prompt_tokens = -1, output_tokens = -1, cached_tokens = -1;  // -1: the server did not say
};

class Sink {
 public:
  virtual ~Sink() = default;
  // `gap`: how far apart the two likeliest tokens were; negative when not known.
  virtual void on_tokens(int count, std::string_view text, double gap) = 0;
  virtual void on_done(const Status& status, const Usage& usage) = 0;  // last, exactly once
};

struct TargetOptions {
  std::string protocol = "kvasir";  // kvasir, ppl, vllm, openai, openai-chat
  std::string address;              // host:port
  std::string model, api_key;
  std::chrono::milliseconds timeout{600'000};
  int connections = 4;  // gRPC channels
};

class Target {
 public:
  virtual ~Target() = default;
  virtual void start(const Ask& ask, std::shared_ptr<Sink> sink) = 0;
  virtual std::string server_figures() { return {}; }  // JSON object of counters, empty if it has none
};

Result<std::unique_ptr<Target>> make_target(const TargetOptions& options);

}  // namespace kvasir::client
