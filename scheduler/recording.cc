#include "scheduler/recording.h"

#include <algorithm>
#include <deque>
#include <map>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "core/cat.h"
#include "scheduler/options_json.h"
#include "scheduler/recorder.h"

namespace kvasir::scheduler {
namespace {

using nlohmann::json;

Time time_of(int64_t ns) { return Time(std::chrono::duration_cast<Duration>(std::chrono::nanoseconds(ns))); }
double seconds(Duration d) { return std::chrono::duration<double>(d).count(); }

// What is wrong with a line is thrown within this file only: json throws where a field is missing or of another
// type, and so does what checks their values. play() turns either into a Status.
struct Wrong : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::vector<int32_t> tokens_of(const std::string& hex) {
  if (hex.size() % 8 != 0) throw Wrong("tokens are 8 hexadecimal digits each");
  std::vector<int32_t> out(hex.size() / 8);
  for (size_t i = 0; i < hex.size(); ++i) {
    const char c = hex[i];
    const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (digit < 0) throw Wrong(cat("'", c, "' is no hexadecimal digit"));
    if (i % 8 == 0 && digit > 7) throw Wrong("a token has 31 bits");
    out[i / 8] = out[i / 8] * 16 + digit;
  }
  return out;
}

class Player {
 public:
  explicit Player(std::vector<StepTime>* steps) : steps_(steps) {}

  Status play(std::istream& in) {
    std::string line;
    for (; std::getline(in, line); ++line_) {
      const bool last = in.eof();  // no newline after it: the writer was killed
      json j = json::parse(line, nullptr, false);
      if (!j.is_object()) {
        if (!last || line_ == 1) return wrong("this is not a JSON object");
        report.cut_short = true;
        break;
      }
      try {
        KVASIR_TRY(line_ == 1 ? begin(j) : call(j));
      } catch (const json::exception& e) {
        return wrong(e.what());
      } catch (const Wrong& e) {
        return wrong(e.what());
      }
      if (!report.identical || report.cut_short) break;
    }
    if (!scheduler_) return invalid_argument("this is not a recording: it is empty");
    const Stats s = scheduler_->stats();
    report.steps = s.steps;
    report.refused = s.refused;
    report.requests = s.requests;
    report.output_tokens = s.output_tokens;
    report.prompt_tokens = s.prompt_tokens;
    report.cached_tokens = s.cached_tokens;
    report.preemptions = s.preemptions;
    report.swaps = s.swaps;
    if (first_time_) report.seconds = seconds(clock_ - *first_time_);
    return {};
  }

  ReplayReport report;
  Settings options;
  std::map<std::string, double> weights;  // that requests said
  SimWorkload workload;

 private:
  struct Live {
    size_t first_item = 0;  // in the workload
    SeqId first = 0;
    int32_t n = 1;
    Time arrival{};
    bool may_be_late = false;  // its masks
  };
  struct Sampling {  // of a sequence, in one plan
    SeqId seq = 0;
    int64_t least = 1, most = 1;  // tokens it may give
  };
  struct Flight {
    Time planned{};
    StepTime work;
    std::vector<Sampling> sampled;
  };

  Status wrong(const std::string& what) const { return invalid_argument(cat("line ", line_, ": ", what)); }
  void differ(const std::string& what) {
    if (report.identical) report.difference = cat("line ", line_, ": ", what);
    report.identical = false;
  }

  Status begin(const json& j) {
    if (j.value("kvasir_recording", 0) != 1) return wrong("this is not a recording of version 1");
    KVASIR_TRY(apply_json(j.at("options").dump(), &options, "the recorded options"));
    KVASIR_ASSIGN(scheduler_, Scheduler::create(options));
    report.policy = options.policy;
    report.about = j.value("about", "");
    return {};
  }

  Time tick(const json& j) {
    const Time t = time_of(j.at("t").get<int64_t>());
    if (!first_time_) first_time_ = t;
    return clock_ = std::max(clock_, t), t;
  }

  Status call(const json& j) {
    const std::string name = j.at("call").get<std::string>();
    ++report.calls;
    if (name == "submit") {
      submit(j);
    } else if (name == "step") {
      KVASIR_TRY(step(j));
    } else if (name == "advance") {
      KVASIR_TRY(advance(j));
    } else if (name == "cancel") {
      const RequestId id = j.at("id").get<RequestId>();
      if (scheduler_->cancel(id).ok()) cancelled(id);
    } else if (name == "pause") {
      (void)scheduler_->pause(j.at("id").get<RequestId>());  // what was refused then is refused now
    } else if (name == "resume") {
      (void)scheduler_->resume(j.at("id").get<RequestId>());
    } else if (name == "mask_ready") {
      (void)scheduler_->mask_ready(j.at("seq").get<SeqId>());
    } else if (name == "stop_at") {
      (void)scheduler_->stop_at(j.at("seq").get<SeqId>(), j.at("tokens").get<int64_t>());
    } else if (name == "propose") {
      (void)scheduler_->propose(j.at("seq").get<SeqId>(), tokens_of(j.at("draft").get<std::string>()));
    } else if (name == "flush") {
      scheduler_->flush_prefix_cache();
    } else if (name == "lost") {
      report.cut_short = true;
      --report.calls;
    } else {
      return wrong(cat("call is \"", name, "\", which is not known"));
    }
    take_events();
    return {};
  }

  void submit(const json& j) {
    const Time now = tick(j);
    const std::string refused = j.value("refused", "");
    // Refused before it touched anything, maybe for a value that is not in the recording.
    if (refused == code_name(Code::invalid_argument) || refused == code_name(Code::already_exists)) return;
    Submission s;
    s.id = j.at("id").get<RequestId>();
    s.tenant = j.at("tenant").get<std::string>();
    s.prompt = tokens_of(j.at("prompt").get<std::string>());
    s.n = j.at("n").get<int32_t>();
    s.beam = j.value("beam", false);
    if (j.contains("max_new")) s.max_new = j["max_new"].get<int64_t>();
    s.priority = j.at("priority").get<int32_t>();
    s.weight = j.value("weight", 0.0);
    if (j.contains("deadline")) s.deadline = time_of(j["deadline"].get<int64_t>());
    s.cache_salt = j.value("salt", "");
    s.adapter = j.value("adapter", "");
    s.no_prefix_read = j.value("no_prefix_read", false);
    s.no_prefix = j.value("no_prefix", false);
    s.whole = j.value("whole", false);
    s.needs_mask = j.value("needs_mask", false);
    Submission copy = s;
    auto first = scheduler_->submit(std::move(copy), now);
    const std::string verdict = first.ok() ? "" : code_name(first.status().code());
    if (verdict != refused || (first.ok() && *first != j.value("seq", SeqId(0))))
      return differ(cat("request ", s.id, " was ", refused.empty() ? "taken" : refused, " and is now ",
                        verdict.empty() ? "taken" : verdict));
    if (!first.ok()) return;
    if (s.weight > 0 && !options.tenant_weights.contains(s.tenant)) weights[s.tenant] = s.weight;
    live_[s.id] = {workload.items.size(), *first, s.n, now, s.needs_mask && !s.beam};
    first_of_[*first] = s.n;
    for (int32_t c = 0; c < s.n; ++c) {
      item_of_[*first + static_cast<SeqId>(c)] = workload.items.size();
      WorkItem item;
      item.arrival_s = seconds(now - *first_time_);
      item.prompt_tokens = static_cast<int64_t>(s.prompt.size());
      item.tenant = s.tenant;
      item.priority = s.priority;
      if (s.deadline) item.deadline_s = seconds(*s.deadline - now);
      item.text = s.prompt;
      workload.items.push_back(std::move(item));
    }
  }

  void cancelled(RequestId id) {
    auto it = live_.find(id);
    if (it == live_.end()) return;
    for (int32_t c = 0; c < it->second.n; ++c)
      workload.items[it->second.first_item + static_cast<size_t>(c)].cancel_at_s = seconds(clock_ - it->second.arrival);
  }

  Status step(const json& j) {
    const Time now = tick(j);
    const std::string recorded = j.value("plan", "");
    scheduler_->next_step(now, plan_);
    std::string made;
    if (!plan_.empty()) {
      const uint64_t digest = plan_digest(plan_, options.page_size);
      char hex[17];
      std::snprintf(hex, sizeof hex, "%016llx", static_cast<unsigned long long>(digest));
      made = hex;
    }
    if (made != recorded)
      differ(
          cat("the plan was ", recorded.empty() ? "empty" : recorded, " and is now ", made.empty() ? "empty" : made));
    if (plan_.empty()) return {};
    Flight& f = flights_.emplace_back();
    f.planned = now;
    f.work = work_of(plan_);
    for (const PlanItem& i : plan_.items)
      for (int32_t d = 0; i.samples && d < i.draws; ++d)
        f.sampled.push_back(
            {i.seq + static_cast<SeqId>(d), may_give_none(i) ? 0 : 1, i.phase == Phase::verify ? i.count : 1});
    return {};
  }

  Status advance(const json& j) {
    const Time now = tick(j);
    if (flights_.empty()) return wrong("a step ends and none is in flight");
    const Flight flight = std::move(flights_.front());
    flights_.pop_front();
    results_.clear();
    storage_.clear();
    for (const json& r : j.at("results")) {
      storage_.push_back(tokens_of(r.at(1).get<std::string>()));
      results_.push_back({.seq = r.at(0).get<SeqId>(), .stop = r.at(2).get<int>() != 0, .parent = r.at(3).get<int>()});
    }
    for (size_t i = 0; i < results_.size(); ++i) results_[i].tokens = storage_[i];
    KVASIR_TRY(check_results(flight));
    scheduler_->advance(results_, now);
    for (const SeqResult& r : results_) {
      auto it = item_of_.find(r.seq);
      if (it == item_of_.end()) continue;
      WorkItem& item = workload.items[it->second];
      item.text.insert(item.text.end(), r.tokens.begin(), r.tokens.begin() + r.accepted);
      item.output_tokens += r.accepted;
    }
    if (steps_ != nullptr) {
      steps_->push_back(flight.work);
      steps_->back().seconds = seconds(now - std::max(flight.planned, last_advance_));
    }
    last_advance_ = now;
    return {};
  }

  // A mask may come late, but for the first token.
  bool may_give_none(const PlanItem& item) const {
    auto it = live_.find(item.request);
    if (it == live_.end() || !it->second.may_be_late) return false;
    const int64_t prompt = workload.items[it->second.first_item].prompt_tokens;
    return static_cast<int64_t>(scheduler_->tokens(item.seq).size()) > prompt;
  }

  // A scheduler trusts its engine; a file is nobody's word.
  Status check_results(const Flight& flight) const {
    std::unordered_map<SeqId, const SeqResult*> by_seq;
    for (const SeqResult& r : results_) {
      if (!by_seq.emplace(r.seq, &r).second) return wrong(cat("sequence ", r.seq, " has two results"));
      if (r.parent >= 0 && scheduler_->alive(r.seq) && !scheduler_->alive(first_of(r.seq) + SeqId(r.parent)))
        return wrong(cat("sequence ", r.seq, " goes on from choice ", r.parent, ", which is not there"));
    }
    for (const auto& [seq, least, most] : flight.sampled) {
      if (!scheduler_->alive(seq)) continue;
      auto it = by_seq.find(seq);
      if (it == by_seq.end()) return wrong(cat("sequence ", seq, " sampled and has no result"));
      const auto given = static_cast<int64_t>(it->second->tokens.size());
      if (given < least || given > most) return wrong(cat("sequence ", seq, " has ", given, " tokens, at most ", most));
    }
    return {};
  }

  SeqId first_of(SeqId seq) const {
    auto it = first_of_.upper_bound(seq);
    return it == first_of_.begin() ? seq : std::prev(it)->first;
  }

  void take_events() {
    scheduler_->take_events(events_);
    for (const Notice& e : events_) {
      auto it = e.kind == Notice::Kind::released ? live_.find(e.request) : live_.end();
      if (it == live_.end()) continue;
      for (int32_t c = 0; c < it->second.n; ++c) item_of_.erase(it->second.first + static_cast<SeqId>(c));
      first_of_.erase(it->second.first);
      live_.erase(it);
    }
  }

  std::vector<StepTime>* steps_;
  int64_t line_ = 1;
  std::unique_ptr<Scheduler> scheduler_;
  std::optional<Time> first_time_;
  Time clock_{}, last_advance_{};
  StepPlan plan_;
  std::deque<Flight> flights_;
  std::vector<SeqResult> results_;
  std::vector<std::vector<int32_t>> storage_;
  std::vector<Notice> events_;
  std::unordered_map<RequestId, Live> live_;
  std::unordered_map<SeqId, size_t> item_of_;
  std::map<SeqId, int32_t> first_of_;  // choice 0 of each request, and how many there are
};

}  // namespace

bool is_recording(const std::string& first_line) { return first_line.starts_with("{\"kvasir_recording\""); }

Result<ReplayReport> replay(std::istream& in, std::vector<StepTime>* steps) {
  Player player(steps);
  KVASIR_TRY(player.play(in));
  return std::move(player.report);
}

Result<RecordedWorkload> read_workload(std::istream& in) {
  Player player(nullptr);
  KVASIR_TRY(player.play(in));
  if (!player.report.identical)
    return failed_precondition(cat("the recording does not replay as it was, so what its requests said is not known: ",
                                   player.report.difference));
  if (player.workload.items.empty()) return invalid_argument("the recording has no requests");
  player.options.tenant_weights.merge(player.weights);
  return RecordedWorkload{std::move(player.options), std::move(player.workload)};
}

std::string to_json(const ReplayReport& r) {
  json j = {{"replayed", true},
            {"identical", r.identical},
            {"about", r.about},
            {"policy", r.policy},
            {"recorded_s", r.seconds},
            {"calls", r.calls},
            {"steps", r.steps},
            {"requests", r.requests},
            {"refused", r.refused},
            {"prompt_tokens", r.prompt_tokens},
            {"cached_tokens", r.cached_tokens},
            {"output_tokens", r.output_tokens},
            {"preemptions", r.preemptions},
            {"swaps", r.swaps},
            {"cut_short", r.cut_short}};
  if (!r.identical) j["difference"] = r.difference;
  return j.dump(2);
}

}  // namespace kvasir::scheduler
