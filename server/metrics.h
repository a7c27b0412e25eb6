// What the server itself counts; the engine's figures are in engine::Stats. No label is one a client can
// choose: protocols and codes are fixed sets.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "engine/histogram.h"

namespace kvasir::server {

class Metrics {
 public:
  static constexpr auto kProtocols = std::to_array<std::string_view>(
      {"kvasir.v1", "ppl", "vllm", "vllm.inference", "vllm.tokens", "kserve", "openai.chat", "openai.completions",
       "openai.responses", "openai.other", "ollama.chat", "ollama.generate", "anthropic.messages", "llama.completion",
       "llama.infill", "sglang", "other"});
  // A generation request ended (or was refused) so.
  void count(std::string_view protocol, Code code);
  // A request that ended well did so by "stop", "length" or "abort".
  static constexpr std::array<std::string_view, 3> kEndings{"stop", "length", "abort"};
  void count_ending(size_t ending) { endings_[ending].fetch_add(1, std::memory_order_relaxed); }
  int64_t ended(size_t ending) const { return endings_[ending].load(std::memory_order_relaxed); }
  // Of requests that were taken: what they asked for, and seconds from their first step to the end.
  struct Requests {
    engine::Histogram choices = engine::size_histogram(), max_tokens = engine::size_histogram(),
                      inference = engine::time_histogram();
  };
  void count_request(int64_t choices, std::optional<int64_t> max_tokens);
  void count_inference(double seconds);
  Requests requests() const;
  void count_auth_failure() { auth_failures_.fetch_add(1, std::memory_order_relaxed); }

  struct Outcome {
    std::string_view protocol;
    Code code;
    int64_t requests;
  };
  std::vector<Outcome> rows() const;  // those that are not zero
  int64_t auth_failures() const { return auth_failures_.load(std::memory_order_relaxed); }

 private:
  static constexpr size_t kCodes = 17;
  std::array<std::atomic<int64_t>, kProtocols.size() * kCodes> requests_{};
  std::array<std::atomic<int64_t>, kEndings.size()> endings_{};
  std::atomic<int64_t> auth_failures_{0};
  mutable std::mutex mutex_;
  Requests of_requests_;
};

}  // namespace kvasir::server
