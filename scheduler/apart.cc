#include "scheduler/apart.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/cat.h"

namespace kvasir::scheduler {
namespace {

// Requests of the workload, by machine.
using Shares = std::vector<std::vector<size_t>>;

double prompt_seconds(const WorkItem& item, const StepCost& c) {
  const double tokens = double(item.prompt_tokens);
  return (tokens * c.token_us + tokens * tokens / 2 * c.context_us) * 1e-6;
}
double answer_seconds(const WorkItem& item, const StepCost& c) {
  const double tokens = double(item.output_tokens), context = double(item.prompt_tokens) + tokens / 2;
  return tokens * (c.decode_token_us + context * c.decode_context_us) * 1e-6;
}

// Each to the machine whose work would end first.
template <class Seconds>
Shares share_out(const std::vector<WorkItem>& items, int64_t machines, Seconds&& seconds) {
  Shares shares(static_cast<size_t>(machines));
  std::vector<double> until(static_cast<size_t>(machines));
  for (size_t i = 0; i < items.size(); ++i) {
    const size_t to = static_cast<size_t>(std::min_element(until.begin(), until.end()) - until.begin());
    until[to] = std::max(until[to], items[i].arrival_s) + seconds(items[i]);
    shares[to].push_back(i);
  }
  return shares;
}

// A request's token times, whoever made them.
struct Times {
  double first_s = -1, last_s = -1;
};

class Fleet {
 public:
  Fleet(const Settings& options, const StepCost* machine) : options_(options), machine_(machine) {}

  // Every machine with its share; times_[i] is then of items[i].
  Status run(const SimWorkload& w, const Shares& shares, bool prompts_come_computed, std::vector<double>& itl) {
    times_.assign(w.items.size(), {});
    for (const std::vector<size_t>& share : shares) {
      if (share.empty()) continue;
      SimWorkload mine;
      mine.prefix_block = w.prefix_block;
      for (size_t i : share) mine.items.push_back(w.items[i]);
      OneOfMany one;
      one.prompts_come_computed = prompts_come_computed;
      KVASIR_ASSIGN(SimReport r, simulate(options_, mine, machine_, &one));
      for (size_t k = 0; k < share.size(); ++k) times_[share[k]] = {one.served[k].first_s, one.served[k].last_s};
      itl.insert(itl.end(), one.itl_s.begin(), one.itl_s.end());
      finished += r.finished, refused += r.refused, preemptions += r.preemptions;
      output_tokens += r.output_tokens;
      end_s = std::max(end_s, r.simulated_s);
    }
    return {};
  }
  const std::vector<Times>& times() const { return times_; }

  int64_t finished = 0, refused = 0, preemptions = 0, output_tokens = 0;
  double end_s = 0;

 private:
  const Settings options_;
  const StepCost* machine_;
  std::vector<Times> times_;
};

FleetReport report_of(const std::vector<WorkItem>& items, const std::vector<Times>& times, std::vector<double>& itl) {
  FleetReport r;
  std::vector<double> ttft, latency;
  for (size_t i = 0; i < items.size(); ++i) {
    if (times[i].first_s >= 0) ttft.push_back(times[i].first_s - items[i].arrival_s);
    if (times[i].last_s >= 0) latency.push_back(times[i].last_s - items[i].arrival_s);
  }
  r.ttft_s = percentiles(ttft);
  r.itl_s = percentiles(itl);
  r.latency_s = percentiles(latency);
  return r;
}

void add_counts(const Fleet& fleet, FleetReport& to) {
  to.refused += fleet.refused;
  to.preemptions += fleet.preemptions;
  to.output_tokens += fleet.output_tokens;
  to.simulated_s = std::max(to.simulated_s, fleet.end_s);
}

Status check(const SimWorkload& w, const Pools& pools) {
  if (pools.prefill < 1 || pools.decode < 1) return invalid_argument("both pools need at least one machine");
  if (!(pools.link_gbps > 0) || pools.bytes_per_token < 1)
    return invalid_argument("a link needs its rate and the bytes of a token in the cache");
  for (size_t i = 0; i < w.items.size(); ++i) {
    const WorkItem& item = w.items[i];
    const char* has = item.follows >= 0 ? "follows" : item.cancel_at_s ? "cancel_at_s" : nullptr;
    if (!item.text.empty()) has = "the text of a recording";
    if (has) return invalid_argument(cat("request ", i, " has ", has, ", which is not simulated with two pools"));
  }
  return {};
}

// What prefills: each prompt, and its first token.
SimWorkload prompts_of(const SimWorkload& w) {
  SimWorkload out = w;
  for (WorkItem& item : out.items) item.output_tokens = std::min<int64_t>(item.output_tokens, 1);
  return out;
}

// A link carries one cache after another, in the order in which prompts end. When each has arrived; -1: none was sent.
std::vector<double> carry(const SimWorkload& w, const Shares& shares, const std::vector<Times>& prefilled,
                          const Pools& pools, ApartReport& report) {
  std::vector<double> arrived(w.items.size(), -1), moved;
  for (std::vector<size_t> share : shares) {
    std::erase_if(share, [&](size_t i) { return prefilled[i].first_s < 0 || w.items[i].output_tokens < 2; });
    std::stable_sort(share.begin(), share.end(),
                     [&](size_t a, size_t b) { return prefilled[a].first_s < prefilled[b].first_s; });
    double free_s = 0;
    for (size_t i : share) {
      const double bytes = double(w.items[i].prompt_tokens) * double(pools.bytes_per_token);
      free_s = std::max(free_s, prefilled[i].first_s) + bytes * 8 / (pools.link_gbps * 1e9);
      report.link_bytes += bytes;
      arrived[i] = free_s;
      moved.push_back(free_s - prefilled[i].first_s);
    }
  }
  report.moved_s = percentiles(moved);
  return arrived;
}

}  // namespace

Result<ApartReport> simulate_apart(const Settings& options, const SimWorkload& w, const Pools& pools,
                                   const StepCost* machine) {
  KVASIR_TRY(check(w, pools));
  const StepCost& cost = machine ? *machine : options.cost;
  ApartReport report;
  report.policy = options.policy;

  Fleet both(options, machine);
  std::vector<double> itl;
  KVASIR_TRY(
      both.run(w,
               share_out(w.items, pools.prefill + pools.decode,
                         [&](const WorkItem& item) { return prompt_seconds(item, cost) + answer_seconds(item, cost); }),
               false, itl));
  report.together = report_of(w.items, both.times(), itl);
  report.together.finished = both.finished;
  add_counts(both, report.together);

  Fleet prefilling(options, machine);
  itl.clear();
  const Shares shares =
      share_out(w.items, pools.prefill, [&](const WorkItem& item) { return prompt_seconds(item, cost); });
  KVASIR_TRY(prefilling.run(prompts_of(w), shares, false, itl));
  std::vector<Times> times = prefilling.times();
  const std::vector<double> arrived = carry(w, shares, times, pools, report);

  std::vector<size_t> order;
  for (size_t i = 0; i < arrived.size(); ++i)
    if (arrived[i] >= 0) order.push_back(i);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return arrived[a] < arrived[b]; });
  SimWorkload answers;
  answers.prefix_block = w.prefix_block;
  for (size_t i : order) {
    WorkItem item = w.items[i];
    item.deadline_s.reset();
    item.arrival_s = arrived[i];
    ++item.prompt_tokens;  // the first token was drawn
    --item.output_tokens;
    answers.items.push_back(std::move(item));
  }
  Settings roomy = options;  // prompts that come computed take nothing of a step's tokens
  roomy.max_tokens_per_step = std::max<int64_t>(options.max_tokens_per_step, options.max_context * 4);
  roomy.max_step_ms = 0;
  Fleet decoding(roomy, machine);
  KVASIR_TRY(decoding.run(
      answers, share_out(answers.items, pools.decode, [&](const WorkItem& item) { return answer_seconds(item, cost); }),
      true, itl));
  for (size_t k = 0; k < order.size(); ++k) {
    const Times& t = decoding.times()[k];
    if (t.first_s >= 0) itl.push_back(t.first_s - times[order[k]].first_s);  // the link's part too
    times[order[k]].last_s = t.last_s;
  }
  report.apart = report_of(w.items, times, itl);
  report.apart.finished = prefilling.finished - int64_t(order.size()) + decoding.finished;
  add_counts(prefilling, report.apart);
  add_counts(decoding, report.apart);
  report.together.machines = report.apart.machines = pools.prefill + pools.decode;
  for (FleetReport* r : {&report.together, &report.apart})
    if (r->simulated_s > 0) r->output_tokens_per_s = double(r->output_tokens) / r->simulated_s;
  if (report.apart.simulated_s > 0)
    report.link_use =
        report.link_bytes * 8 / (pools.link_gbps * 1e9 * double(pools.prefill) * report.apart.simulated_s);
  return report;
}

std::string to_json(const std::vector<ApartReport>& reports) {
  using nlohmann::json;
  auto percents = [](const Percentiles& p) {
    return json{{"p50", p.p50}, {"p90", p.p90}, {"p99", p.p99}, {"mean", p.mean}};
  };
  auto fleet = [&](const FleetReport& r) {
    return json{{"machines", r.machines},
                {"finished", r.finished},
                {"refused", r.refused},
                {"preemptions", r.preemptions},
                {"output_tokens", r.output_tokens},
                {"simulated_s", r.simulated_s},
                {"ttft_s", percents(r.ttft_s)},
                {"itl_s", percents(r.itl_s)},
                {"latency_s", percents(r.latency_s)},
                {"output_tokens_per_s", r.output_tokens_per_s}};
  };
  json all = json::array();
  for (const ApartReport& r : reports)
    all.push_back({{"policy", r.policy},
                   {"together", fleet(r.together)},
                   {"apart", fleet(r.apart)},
                   {"link", {{"bytes", r.link_bytes}, {"use", r.link_use}, {"moved_s", percents(r.moved_s)}}}});
  return all.dump(2);
}

}  // namespace kvasir::scheduler
