// A server under load, whatever it speaks. start() never blocks; what happens is told to the Sink, from the
// target's own threads, one call at a time for each request.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "client/server_figures.h"
#include "client/tls.h"
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

struct AnswerPiece {  // of an answer, as it came
  int count = 1;      // tokens
  std::string_view text;
  double top_gap = -1;   // how far apart in log-probability the two likeliest tokens were; -1: not known
  double logprob = NAN;  // of the (last) token itself; NAN: not known
};

// The gap between the greatest two; -1 when there are fewer.
double top_gap_of(const std::vector<double>& logprobs);
// The lesser of two gaps that may be unknown: a piece may carry several tokens, and each may be the one that differs.
inline double lesser_gap(double a, double b) { return a < 0 || b < 0 ? std::max(a, b) : std::min(a, b); }

class Sink {
 public:
  virtual ~Sink() = default;
  virtual void on_tokens(const AnswerPiece& piece) = 0;
  virtual void on_done(const Status& status, const Usage& usage) = 0;  // last, exactly once
};

struct TargetOptions {
  std::string protocol = "kvasir";  // kvasir, ppl, vllm, openai, openai-chat
  std::string address;              // HOST:PORT; http:// or https:// may stand before it where HTTP is spoken
  std::string model, api_key;
  TlsFiles tls;
  std::string metrics;  // HOST:PORT or URL of a Prometheus page to read beside; empty: what the protocol itself has
  std::chrono::milliseconds timeout{600'000};
  int connections = 4;  // gRPC channels
};

class Target {
 public:
  virtual ~Target() = default;
  virtual void start(const Ask& ask, std::shared_ptr<Sink> sink) = 0;
  // Several at the same moment: in one call where the contract can (ppl's), one by one elsewhere.
  virtual void start_together(std::vector<std::pair<Ask, std::shared_ptr<Sink>>> asks) {
    for (auto& [ask, sink] : asks) start(ask, std::move(sink));
  }
  virtual ServerFigures server_figures() { return {}; }  // blocks for 2 seconds at most
};

Result<std::unique_ptr<Target>> make_target(const TargetOptions& options);

}  // namespace kvasir::client
