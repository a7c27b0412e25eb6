// What is asked and when: prompts with their output lengths, and the times they arrive.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "core/status.h"

namespace kvasir::client {

// "128" fixed, "64-256" uniform, "lognormal:128,0.6" (median, sigma).
class Length {
 public:
  static Result<Length> parse(const std::string& text, const std::string& field);
  int draw(std::mt19937_64& random) const;

 private:
  enum class Kind { fixed, uniform, lognormal } kind_ = Kind::fixed;
  double a_ = 128, b_ = 0;
};

struct Prompt {
  std::string text;
  int max_tokens = 0;
  std::vector<std::string> later;  // what the conversation asked after that, where a file says so
};

struct WorkloadOptions {
  std::string input_length = "128", output_length = "128";
  int shared_prefix = 0;  // words that every prompt of a group begins with
  int prefix_groups = 1;
  std::string file;  // JSONL or JSON of prompts or ShareGPT conversations, or a trace (CSV or JSONL)
  uint64_t seed = 1;
};

struct Workload {
  std::vector<Prompt> prompts;   // used in turn
  std::vector<double> arrivals;  // seconds, of a trace; empty otherwise
};
Result<Workload> make_workload(const WorkloadOptions& options, int count);

// A text of so many words, about one token each.
std::string words(int count, std::mt19937_64& random);

struct ArrivalOptions {
  std::string pattern = "poisson";  // poisson, constant, bursty, ramp, at-once
  double rate = 1;                  // a second; for ramp, at the end
  double burstiness = 0.25;         // shape of the gamma gaps: below 1 comes in bursts
  uint64_t seed = 1;
};
// Seconds from the start, ascending.
Result<std::vector<double>> arrivals(const ArrivalOptions& options, int count);

}  // namespace kvasir::client
