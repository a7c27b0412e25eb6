// How long a prompt and its answer took, as the server saw it: from the request to the first token, from there on.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>

namespace kvasir::server::http {

class Timings {
 public:
  using Clock = std::chrono::steady_clock;

  void started() { started_ = last_ = Clock::now(); }
  void tokens(size_t n) {
    last_ = Clock::now();
    if (n > 0 && !first_) first_ = last_;
  }
  int64_t prompt_ns() const { return ns(began_, first_.value_or(last_)); }
  int64_t answer_ns() const { return first_ ? ns(*first_, last_) : 0; }
  int64_t all_ns() const { return ns(began_, Clock::now()); }

  // vLLM's `metrics`.
  nlohmann::ordered_json metrics(int64_t made) const {
    const double all_ms = ms(started_, last_);
    nlohmann::ordered_json out{{"time_to_first_token_ms", ms(started_, first_.value_or(last_))},
                               {"generation_time_ms", double(answer_ns()) / 1e6},
                               {"queue_time_ms", ms(began_, started_)}};
    if (made > 1) out["mean_itl_ms"] = double(answer_ns()) / 1e6 / double(made - 1);
    if (all_ms > 0) out["tokens_per_second"] = 1e3 * double(made) / all_ms;
    return out;
  }

  // llama-server's `timings`.
  nlohmann::ordered_json json(int64_t prompt_tokens, int64_t cached, int64_t made) const {
    const int64_t read = std::max<int64_t>(0, prompt_tokens - cached);
    const double prompt_ms = double(prompt_ns()) / 1e6, answer_ms = double(answer_ns()) / 1e6;
    auto over = [](double a, double b) { return b > 0 ? a / b : 0; };
    const double steps = double(std::max<int64_t>(0, made - 1));  // the first came with the prompt
    return {{"cache_n", cached},
            {"prompt_n", read},
            {"prompt_ms", prompt_ms},
            {"prompt_per_token_ms", over(prompt_ms, double(read))},
            {"prompt_per_second", over(1e3 * double(read), prompt_ms)},
            {"predicted_n", made},
            {"predicted_ms", answer_ms},
            {"predicted_per_token_ms", over(answer_ms, steps)},
            {"predicted_per_second", over(1e3 * steps, answer_ms)}};
  }

 private:
  static int64_t ns(Clock::time_point from, Clock::time_point to) {
    return std::max<int64_t>(0, std::chrono::duration_cast<std::chrono::nanoseconds>(to - from).count());
  }
  static double ms(Clock::time_point from, Clock::time_point to) { return double(ns(from, to)) / 1e6; }
  const Clock::time_point began_ = Clock::now();
  Clock::time_point started_ = began_, last_ = began_;
  std::optional<Clock::time_point> first_;
};

}  // namespace kvasir::server::http
