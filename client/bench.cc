#include "client/bench.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "core/cat.h"

namespace kvasir::client {
namespace {

constexpr int kMaxRequests = 5'000'000;
constexpr int kUsualRequests = 100;
constexpr int kSyntheticPrompts = 10'000;  // used in turn when there are more requests

bool at_once(const BenchOptions& o) { return o.arrival.pattern == "at-once"; }

std::string short_number(double v) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%.4g", v);
  return buffer;
}

class Bencher {
 public:
  Bencher(Target& target, const BenchOptions& options, const Workload& workload, const std::atomic<bool>& stop,
          const OnProgress& progress)
      : target_(target), o_(options), workload_(workload), stop_(stop), progress_(progress) {}

  Status one_load(Bench& b, bool open) {
    const int64_t in_file = static_cast<int64_t>(workload_.prompts.size()) * o_.turns;
    const int usual =
        o_.workload.file.empty() ? kUsualRequests : static_cast<int>(std::min<int64_t>(in_file, kMaxRequests));
    const int requests = o_.requests > 0 ? o_.requests : o_.duration > 0 ? kMaxRequests : usual;
    LoadOptions l = load(open ? 0 : o_.concurrency, requests);
    if (o_.rate > 0 && o_.duration > 0) {  // no more than can arrive
      const double conversations = o_.duration * o_.rate * 2 + 10;
      l.requests = static_cast<int>(std::min<double>(requests, conversations * o_.turns));
    }
    KVASIR_TRY(run(std::move(l), o_.rate, "load"));
    b.run = std::move(last_);
    b.report.figures = figures_of(b.run, o_.slo);
    return {};
  }

  // The highest load within the SLO: double while it holds, then halve the gap.
  Status sweep(Bench& b) {
    const bool by_rate = o_.sweep == "rate";
    const double seconds = o_.duration > 0 ? o_.duration : 15;
    double good = 0, bad = 0, load_now = o_.sweep_low;
    for (int probe = 0; probe < 14 && !stop_; ++probe) {
      if (!by_rate) load_now = std::round(load_now);
      LoadOptions l = load(by_rate ? 0 : static_cast<int>(load_now), kMaxRequests);
      l.duration = seconds;
      if (by_rate) l.requests = static_cast<int>(std::clamp(load_now * seconds, 10.0, 1e6)) * o_.turns;
      KVASIR_TRY(run(std::move(l), by_rate ? load_now : 0, cat(o_.sweep, " ", short_number(load_now))));
      Point p{load_now, figures_of(last_, o_.slo), false};
      p.within = !p.figures.partial && p.figures.good > 0 && p.figures.within_slo >= o_.slo_share;
      (p.within ? good : bad) = load_now;
      const bool gone = p.figures.partial;
      if (p.within || good == 0) {  // the run that is told of is the best one, or the last when none was good
        b.run = std::move(last_);
        b.report.figures = p.figures;
        used_ = last_options_;
      }
      b.report.points.push_back(std::move(p));
      if (gone) break;
      if (bad == 0) {
        if (load_now >= o_.sweep_high) break;
        load_now = std::min(load_now * 2, o_.sweep_high);
      } else if (good == 0) {
        if (!by_rate && load_now <= 1) break;
        load_now = by_rate ? load_now / 2 : std::floor(load_now / 2);
      } else {
        if (bad - good <= (by_rate ? good * 0.05 : 1)) break;
        load_now = (good + bad) / 2;
      }
    }
    b.report.best = good;
    return {};
  }

  Verification verification(const Bench& b) const { return verify(target_, workload_, used_, b.run, o_.verify, stop_); }

 private:
  LoadOptions load(int concurrency, int requests) const {
    LoadOptions l;
    l.requests = requests;
    l.duration = o_.duration;
    l.concurrency = concurrency;
    l.batch = o_.batch;
    l.turns = o_.turns;
    l.turn_words = o_.turn_words;
    l.temperature = o_.temperature;
    l.ignore_eos = o_.ignore_eos;
    l.seed = o_.seed;
    l.keep_text = o_.verify > 0 || o_.keep_text;
    return l;
  }

  Status run(LoadOptions l, double rate, const std::string& what) {
    if (l.concurrency == 0 && (rate > 0 || at_once(o_))) {
      ArrivalOptions a = o_.arrival;
      a.rate = rate;
      a.seed = o_.seed;
      KVASIR_ASSIGN(l.due, arrivals(a, (l.requests + o_.turns - 1) / o_.turns));
    } else if (l.concurrency == 0) {
      for (const double at : workload_.arrivals) l.due.push_back(at / o_.time_scale);
      l.requests = static_cast<int>(l.due.size()) * o_.turns;
    }
    last_ = run_load(target_, workload_, l, stop_, [&](const Progress& p) {
      if (progress_) progress_(what, p);
    });
    last_options_ = used_ = std::move(l);
    return {};
  }

  Target& target_;
  const BenchOptions& o_;
  const Workload& workload_;
  const std::atomic<bool>& stop_;
  const OnProgress& progress_;
  LoadRun last_;
  LoadOptions last_options_, used_;  // of the last run, and of the one that is told of
};

std::vector<std::pair<std::string, std::string>> settings_of(const BenchOptions& o, bool open, bool replay) {
  std::string load = cat("closed loop, ", o.concurrency, " clients");
  if (!o.sweep.empty()) {
    load = "sweep of " + o.sweep;
  } else if (replay) {
    load = "replay of " + o.workload.file;
  } else if (at_once(o)) {
    load = "open loop, all at once";
  } else if (open) {
    load = cat("open loop, ", o.arrival.pattern, " at ", short_number(o.rate), " a second");
  }
  if (o.batch > 1) load += cat(", ", o.batch, " in a call");
  if (o.turns > 1) load += cat(", conversations of ", o.turns, " turns");
  return {{"protocol", o.target.protocol},
          {"address", o.target.address},
          {"load", load},
          {"prompts", o.workload.file.empty() ? o.workload.input_length + " words" : o.workload.file},
          {"output", o.workload.output_length + (o.ignore_eos ? " tokens, past the end of text" : " tokens at most")},
          {"shared prefix", cat(o.workload.shared_prefix, " words in ", o.workload.prefix_groups, " groups")},
          {"temperature", short_number(o.temperature)},
          {"seed", cat(o.seed)}};
}

}  // namespace

Result<Bench> run_bench(Target& target, const BenchOptions& o, const std::atomic<bool>& stop,
                        const OnProgress& progress) {
  const int prompts = o.requests > 0 ? o.requests : o.workload.file.empty() ? kSyntheticPrompts : kMaxRequests;
  Bench b;
  KVASIR_ASSIGN(b.workload, make_workload(o.workload, prompts));
  const Workload& workload = b.workload;
  const bool open_by_rate = o.rate > 0 || at_once(o);
  const bool replay = !workload.arrivals.empty() && !open_by_rate && !o.closed && o.sweep.empty();
  const bool open = open_by_rate || replay;
  Bencher bencher(target, o, workload, stop, progress);
  Report& r = b.report;
  r.sweep = o.sweep;
  r.settings = settings_of(o, open, replay);
  r.title = "kvasir bench: " + o.target.address;
  ServerWatch watch([&target] { return target.server_figures(); });
  KVASIR_TRY(o.sweep.empty() ? bencher.one_load(b, open) : bencher.sweep(b));
  r.server = watch.stop();
  if (ServerFigures after = target.server_figures(); !after.empty() && !r.server.empty())
    r.server.push_back({r.server.back().at + 1, std::move(after)});
  if (o.verify > 0 && !stop && !r.figures.partial) r.verification = bencher.verification(b);
  return b;
}

}  // namespace kvasir::client
