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

constexpr int kMostTokens = 1'000'000;  // of one prompt or answer

struct Trace {
  double at;
  int64_t input, output;
  std::vector<int64_t> blocks;  // Mooncake: ids of shared blocks of 512 tokens
};

constexpr int kMooncakeBlock = 512;

std::string prompt_of(const Trace& t, std::mt19937_64& random) {
  std::string text;
  int left = static_cast<int>(t.input);
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

Status add(const Trace& t, std::mt19937_64& random, Workload& w) {
  if (t.input < 0 || t.input > kMostTokens || t.output < 0 || t.output > kMostTokens || !std::isfinite(t.at))
    return invalid_argument(cat("is of ", t.input, " and ", t.output, " tokens; each may be 0 to ", kMostTokens));
  w.prompts.push_back({prompt_of({t.at, std::max<int64_t>(1, t.input), t.output, t.blocks}, random),
                       static_cast<int>(std::max<int64_t>(1, t.output)),
                       {}});
  w.arrivals.push_back(t.at);
  return {};
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

std::vector<std::string> cells_of(std::string line) {
  while (!line.empty() && (line.back() == '\r' || line.back() == ' ')) line.pop_back();
  std::vector<std::string> out;
  for (size_t at = 0; at <= line.size();) {
    const size_t end = std::min(line.find(',', at), line.size());
    out.push_back(line.substr(at, end - at));
    at = end + 1;
  }
  return out;
}

// -1 when it is no whole number.
int64_t count_of(const std::string& text) {
  char* end = nullptr;
  const int64_t n = std::strtoll(text.c_str(), &end, 10);
  return text.empty() || *end != 0 ? -1 : n;
}

// Azure's columns, in any order and among others.
Result<Workload> from_csv(std::istream& in, const std::string& file, int count, std::mt19937_64& random) {
  constexpr const char* kColumns[] = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"};
  std::string line;
  std::getline(in, line);
  const std::vector<std::string> names = cells_of(line);
  size_t column[3], last = 0;
  for (int i = 0; i < 3; ++i) {
    column[i] = static_cast<size_t>(std::find(names.begin(), names.end(), kColumns[i]) - names.begin());
    if (column[i] == names.size())
      return invalid_argument(cat(file, " line 1 has no column ", kColumns[i],
                                  "; a trace has TIMESTAMP, ContextTokens and GeneratedTokens"));
    last = std::max(last, column[i]);
  }
  Workload w;
  for (int n = 2; static_cast<int>(w.prompts.size()) < count && std::getline(in, line); ++n) {
    const std::vector<std::string> cells = cells_of(line);
    if (cells.size() == 1 && cells[0].empty()) continue;
    const double at = cells.size() > last ? azure_seconds(cells[column[0]]) : NAN;
    if (std::isnan(at) || count_of(cells[column[1]]) < 0 || count_of(cells[column[2]]) < 0)
      return invalid_argument(
          cat(file, " line ", n, " is not a time such as 2023-11-16 18:17:03.98 and two numbers of tokens"));
    if (Status s = add({at, count_of(cells[column[1]]), count_of(cells[column[2]]), {}}, random, w); !s.ok())
      return invalid_argument(cat(file, " line ", n, ' ', s.message()));
  }
  if (w.prompts.empty()) return invalid_argument(file + " has nothing to ask");
  return w;
}

// What its later turns ask: every other text, or those of the human where it is said who speaks.
std::vector<std::string> later_turns(const Json& turns) {
  std::vector<std::string> later;
  for (size_t i = 1; i < turns.size(); ++i) {
    if (!turns[i].contains("value")) continue;
    const std::string from = turns[i].value("from", i % 2 ? "gpt" : "human");
    if (from == "human" || from == "user") later.push_back(turns[i]["value"].get<std::string>());
  }
  return later;
}

// One entry of a file; false when it has nothing to ask.
Result<bool> add_entry(const Json& j, int output, std::mt19937_64& random, Workload& w) {
  if (j.contains("input_length") && j.contains("timestamp")) {  // Mooncake
    Trace t{j["timestamp"].get<double>() / 1000,
            j["input_length"].get<int64_t>(),
            j.value("output_length", int64_t(output)),
            {}};
    if (j.contains("hash_ids")) t.blocks = j["hash_ids"].get<std::vector<int64_t>>();
    KVASIR_TRY(add(t, random, w));
    return true;
  }
  if (j.contains("conversations") && j["conversations"].is_array() && !j["conversations"].empty()) {  // ShareGPT
    const Json& turns = j["conversations"];
    if (!turns[0].contains("value")) return false;
    int length = output;
    if (turns.size() > 1 && turns[1].contains("value")) {  // about four characters a token
      length = std::clamp(static_cast<int>(turns[1]["value"].get<std::string>().size() / 4), 4, 1024);
    }
    w.prompts.push_back({turns[0]["value"].get<std::string>(), length, later_turns(turns)});
    return true;
  }
  for (const char* key : {"prompt", "text", "question"}) {
    if (j.contains(key) && j[key].is_string()) {
      const double most = j.value("max_tokens", static_cast<double>(output));
      if (!(most >= 1 && most <= kMostTokens))
        return invalid_argument(cat("has max_tokens ", most, "; it may be 1 to ", kMostTokens));
      w.prompts.push_back({j[key].get<std::string>(), static_cast<int>(most), {}});
      return true;
    }
  }
  return false;
}

// A list of entries, some of which may be empty, as ShareGPT's are.
Result<Workload> from_list(std::istream& in, const WorkloadOptions& o, int count, const Length& output,
                           std::mt19937_64& random) {
  Workload w;
  try {
    for (const Json& j : Json::parse(in)) {
      if (static_cast<int>(w.prompts.size()) >= count) break;
      if (auto added = add_entry(j, output.draw(random), random, w); !added.ok())
        return invalid_argument(cat(o.file, ": an entry ", added.status().message()));
    }
  } catch (const Json::exception& e) {
    return invalid_argument(o.file + ": " + e.what());
  }
  return w;
}

Result<Workload> from_lines(std::istream& in, const WorkloadOptions& o, int count, const Length& output,
                            std::mt19937_64& random) {
  Workload w;
  int n = 0;
  for (std::string line; static_cast<int>(w.prompts.size()) < count && std::getline(in, line);) {
    ++n;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const auto wrong = [&](const std::string& what) { return invalid_argument(cat(o.file, " line ", n, what)); };
    try {
      auto added = add_entry(Json::parse(line), output.draw(random), random, w);
      if (!added.ok()) return wrong(" " + added.status().message());
      if (!*added) return wrong(" has no prompt, conversations or trace columns");
    } catch (const Json::exception& e) {
      return wrong(std::string(": ") + e.what());
    }
  }
  return w;
}

Result<Workload> from_file(const WorkloadOptions& o, int count, const Length& output, std::mt19937_64& random) {
  std::ifstream in(o.file);
  if (!in) return not_found("prompts file " + o.file + " cannot be opened");
  if (o.file.ends_with(".csv")) return from_csv(in, o.file, count, random);
  while (in && std::isspace(in.peek())) in.get();
  KVASIR_ASSIGN(Workload w,
                in.peek() == '[' ? from_list(in, o, count, output, random) : from_lines(in, o, count, output, random));
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
  const auto length = [](double x) { return x >= 1 && x <= kMostTokens; };
  if (std::sscanf(text.c_str(), "lognormal:%lf,%lf%c", &l.a_, &l.b_, &rest) == 2 && length(l.a_) && l.b_ >= 0 &&
      l.b_ < 5) {
    l.kind_ = Kind::lognormal;
    return l;
  }
  if (std::sscanf(text.c_str(), "%lf-%lf%c", &l.a_, &l.b_, &rest) == 2 && length(l.a_) && length(l.b_) &&
      l.b_ >= l.a_) {
    l.kind_ = Kind::uniform;
    return l;
  }
  if (std::sscanf(text.c_str(), "%lf%c", &l.a_, &rest) == 1 && length(l.a_)) return l;
  return invalid_argument(
      cat(field, " is ", text, "; it must be N, LOW-HIGH or lognormal:MEDIAN,SIGMA, from 1 to ", kMostTokens));
}

int Length::draw(std::mt19937_64& random) const {
  switch (kind_) {
    case Kind::uniform: return std::uniform_int_distribution<int>(static_cast<int>(a_), static_cast<int>(b_))(random);
    case Kind::lognormal:
      return static_cast<int>(
          std::clamp(std::lognormal_distribution<double>(std::log(a_), b_)(random), 1.0, double(kMostTokens)));
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
    w.prompts.push_back({std::move(text), output.draw(random), {}});
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
