// What the server itself counts; the engine's figures are in engine::Stats. No label is one a client can
// choose: protocols and codes are fixed sets.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace kvasir::server {

class Metrics {
 public:
  static constexpr std::array<std::string_view, 10> kProtocols{
      "kvasir.v1",          "ppl",          "vllm", "kserve", "openai.chat", "openai.completions", "openai.responses",
      "anthropic.messages", "openai.other", "other"};
  // A generation request ended (or was refused) so.
  void count(std::string_view protocol, Code code);
  // A request that ended well did so by "stop", "length" or "abort".
  static constexpr std::array<std::string_view, 3> kEndings{"stop", "length", "abort"};
  void count_ending(size_t ending) { endings_[ending].fetch_add(1, std::memory_order_relaxed); }
  int64_t ended(size_t ending) const { return endings_[ending].load(std::memory_order_relaxed); }
  void count_auth_failure() { auth_failures_.fetch_add(1, std::memory_order_relaxed); }

  struct Row {
    std::string_view protocol;
    Code code;
    int64_t requests;
  };
  std::vector<Row> rows() const;  // those that are not zero
  int64_t auth_failures() const { return auth_failures_.load(std::memory_order_relaxed); }

 private:
  static constexpr size_t kCodes = 17;
  std::array<std::atomic<int64_t>, kProtocols.size() * kCodes> requests_{};
  std::array<std::atomic<int64_t>, kEndings.size()> endings_{};
  std::atomic<int64_t> auth_failures_{0};
};

}  // namespace kvasir::server
