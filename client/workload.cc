#include "client/workload.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "core/cat.h"

namespace kvasir::client {
namespace {

using Json = nlohmann::json;

constexpr std::array kWords = {
    "time",  "year",   "people", "way",     "day",     "man",     "thing",    "woman",   "life",       "child",
    "world", "school", "state",  "family",  "student", "group",   "country",  "problem", "hand",       "part",
    "place", "case",   "week",   "company", "system",  "program", "question", "work",    "government", "number",
    "night", "point",  "home",   "water",   "room",    "mother",  "area",     "money",   "story",      "fact",
    "month", "lot",    "right",  "study",   "book",    "eye",     "job",      "word",    "business",   "issue"};

struct Trace {
  double at;
  int input, output;
  std::vector<int64_t> blocks;  // Mooncake: ids of shared blocks of 512 tokens
};

constexpr int kMooncakeBlock = 512;

std::string prompt_of(const Trace& t, std::mt19937_64& random) {
  std::string text;
  int left = t.input;
  for (const int64_t block : t.blocks) {
    if (left <= 0) break;
    std::mt19937_64 own(static_cast<uint64_t>(block) + 1);
    if (!text.empty()) text += ' ';
    text += words(std::min(left, kMooncakeBlock), own);
    left -= kMooncakeBlock;
  }
  if (left > 0) text += (text.empty() ? "" : " ") + words(left, random);
  return text;
}

// "2023-11-16 18:17:03.9799600" as seconds of its day and date.
double azure_seconds(const std::string& text) {
  std::tm tm{};
  double second = 0;
  if (std::sscanf(text.c_str(), "%d-%d-%d %d:%d:%lf", &tm.tm_year, &tm.tm_mon, &tm.tm_mday, &tm.tm_hour, &tm.tm_min,
                  &second) != 6) {
    return NAN;
  }
  tm.tm_year -= 1900;
  tm.tm_mon -= 1;
  return static_cast<double>(timegm(&tm)) + second;
}

Result<Workload> from_csv(std::istream& in, const std::string& file, int count, std::mt19937_64& random) {
  std::string line;
  std::getline(in, line);  // TIMESTAMP,ContextTokens,GeneratedTokens
  Workload w;
  for (int n = 2; static_cast<int>(w.prompts.size()) < count && std::getline(in, line); ++n) {
    const size_t a = line.find(','), b = line.find(',', a + 1);
    const double at = a == std::string::npos ? NAN : azure_seconds(line.substr(0, a));
    if (std::isnan(at) || b == std::string::npos) {
      return invalid_argument(file + " line " + std::to_string(n) + " is not TIMESTAMP,ContextTokens,GeneratedTokens");
    }
    const Trace t{at, std::atoi(line.c_str() + a + 1), std::atoi(line.c_str() + b + 1), {}};
    w.prompts.push_back({prompt_of(t, random), std::max(1, t.output)});
    w.arrivals.push_back(t.at);
  }
  return w;
}

// One entry of a file; false when it has nothing to ask.
bool add_entry(const Json& j, int output, std::mt19937_64& random, Workload& w) {
  if (j.contains("input_length") && j.contains("timestamp")) {  // Mooncake
    Trace t{j["timestamp"].get<double>() / 1000, j["input_length"].get<int>(), j.value("output_length", output), {}};
    if (j.contains("hash_ids")) t.blocks = j["hash_ids"].get<std::vector<int64_t>>();
    w.prompts.push_back({prompt_of(t, random), std::max(1, t.output)});
    w.arrivals.push_back(t.at);
    return true;
  }
  if (j.contains("conversations") && j["conversations"].is_array() && !j["conversations"].empty()) {  // ShareGPT
    const Json& turns = j["conversations"];
    if (!turns[0].contains("value")) return false;
    int length = output;
    if (turns.size() > 1 && turns[1].contains("value")) {  // about four characters a token
      length = std::clamp(static_cast<int>(turns[1]["value"].get<std::string>().size() / 4), 4, 1024);
    }
    w.prompts.push_back({turns[0]["value"].get<std::string>(), length});
    return true;
  }
  for (const char* key : {"prompt", "text", "question"}) {
    if (j.contains(key) && j[key].is_string()) {
      w.prompts.push_back({j[key].get<std::string>(), j.value("max_tokens", output)});
      return true;
    }
  }
  return false;
}

Result<Workload> from_file(const WorkloadOptions& o, int count, const Length& output, std::mt19937_64& random) {
  std::ifstream in(o.file);
  if (!in) return not_found("prompts file " + o.file + " cannot be opened");
  if (o.file.ends_with(".csv")) return from_csv(in, o.file, count, random);
  Workload w;
  try {
    while (in && std::isspace(in.peek())) in.get();
    if (in.peek() == '[') {
      for (const Json& j : Json::parse(in)) {
        if (static_cast<int>(w.prompts.size()) >= count) break;
        add_entry(j, output.draw(random), random, w);
      }
    } else {
      int n = 0;
      for (std::string line; static_cast<int>(w.prompts.size()) < count && std::getline(in, line);) {
        ++n;
        if (line.empty()) continue;
        if (!add_entry(Json::parse(line), output.draw(random), random, w)) {
          return invalid_argument(o.file + " line " + std::to_string(n) +
                                  " has no prompt, conversations or trace columns");
        }
      }
    }
  } catch (const Json::exception& e) {
    return invalid_argument(o.file + ": " + e.what());
  }
  if (w.prompts.empty()) return invalid_argument(o.file + " has nothing to ask");
  return w;
}

// The earliest at 0, each prompt staying with its time.
Workload in_order(Workload w) {
  std::vector<size_t> order(w.arrivals.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return w.arrivals[a] < w.arrivals[b]; });
  Workload sorted;
  for (const size_t i : order) {
    sorted.prompts.push_back(std::move(w.prompts[i]));
    sorted.arrivals.push_back(w.arrivals[i] - w.arrivals[order[0]]);
  }
  return sorted;
}

}  // namespace

Result<Length> Length::parse(const std::string& text, const std::string& field) {
  Length l;
  char rest = 0;
  if (std::sscanf(text.c_str(), "lognormal:%lf,%lf%c", &l.a_, &l.b_, &rest) == 2 && l.a_ >= 1 && l.b_ >= 0 &&
      l.b_ < 5) {
    l.kind_ = Kind::lognormal;
    return l;
  }
  if (std::sscanf(text.c_str(), "%lf-%lf%c", &l.a_, &l.b_, &rest) == 2 && l.a_ >= 1 && l.b_ >= l.a_) {
    l.kind_ = Kind::uniform;
    return l;
  }
  if (std::sscanf(text.c_str(), "%lf%c", &l.a_, &rest) == 1 && l.a_ >= 1) return l;
  return invalid_argument(field + " is " + text + "; it must be N, LOW-HIGH or lognormal:MEDIAN,SIGMA");
}

int Length::draw(std::mt19937_64& random) const {
  constexpr double kMost = 1'000'000;
  switch (kind_) {
    case Kind::uniform: return std::uniform_int_distribution<int>(static_cast<int>(a_), static_cast<int>(b_))(random);
    case Kind::lognormal:
      return static_cast<int>(std::clamp(std::lognormal_distribution<double>(std::log(a_), b_)(random), 1.0, kMost));
    default: return static_cast<int>(a_);
  }
}

std::string words(int count, std::mt19937_64& random) {
  std::string text;
  for (int i = 0; i < count; ++i) {
    if (i) text += ' ';
    text += kWords[random() % kWords.size()];
  }
  return text;
}

Result<Workload> make_workload(const WorkloadOptions& o, int count) {
  std::mt19937_64 random(o.seed);
  KVASIR_ASSIGN(const Length input, Length::parse(o.input_length, "input_len"));
  KVASIR_ASSIGN(const Length output, Length::parse(o.output_length, "output_len"));
  if (!o.file.empty()) {
    KVASIR_ASSIGN(Workload w, from_file(o, count, output, random));
    if (w.arrivals.empty()) return w;
    if (w.arrivals.size() != w.prompts.size())
      return invalid_argument(o.file + " has times for some of its entries only: a trace has one for each");
    return in_order(std::move(w));
  }
  std::vector<std::string> prefixes;
  for (int i = 0; o.shared_prefix > 0 && i < std::max(1, o.prefix_groups); ++i) {
    prefixes.push_back(words(o.shared_prefix, random) + " ");
  }
  Workload w;
  for (int i = 0; i < count; ++i) {
    std::string text = prefixes.empty() ? std::string() : prefixes[random() % prefixes.size()];
    text += words(input.draw(random), random);
    w.prompts.push_back({std::move(text), output.draw(random)});
  }
  return w;
}

Result<std::vector<double>> arrivals(const ArrivalOptions& o, int count) {
  if (o.pattern == "at-once") return std::vector<double>(static_cast<size_t>(count), 0.0);
  if (!(o.rate > 0)) return invalid_argument(cat("rate is ", o.rate, "; it must be above 0"));
  std::mt19937_64 random(o.seed);
  std::vector<double> out;
  double at = 0;
  for (int i = 0; i < count; ++i) {
    out.push_back(at);
    if (o.pattern == "poisson") {
      at += std::exponential_distribution<double>(o.rate)(random);
    } else if (o.pattern == "constant") {
      at += 1 / o.rate;
    } else if (o.pattern == "bursty") {
      at += std::gamma_distribution<double>(o.burstiness, 1 / (o.rate * o.burstiness))(random);
    } else if (o.pattern == "ramp") {
      // The rate grows evenly from 0: request i of n arrives when the area under it is i.
      at = 2 * std::sqrt(static_cast<double>(count) * (i + 1)) / o.rate;
    } else {
      return invalid_argument("arrival is " + o.pattern + "; it must be poisson, constant, bursty, ramp or at-once");
    }
  }
  return out;
}

}  // namespace kvasir::client
