#include "client/bench.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace kvasir::client {
namespace {

constexpr int kMaxRequests = 5'000'000;

std::string short_number(double v) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%.4g", v);
  return buffer;
}

struct Driver {
  Target& target;
  const BenchOptions& options;
  const std::atomic<bool>& stop;
  const OnProgress& progress;

  LoadOptions load(const Workload& workload, double rate, int concurrency, int requests) const {
    LoadOptions l;
    l.requests = requests;
    l.duration = options.duration;
    l.concurrency = concurrency;
    l.turns = options.turns;
    l.turn_words = options.turn_words;
    l.temperature = options.temperature;
    l.ignore_eos = options.ignore_eos;
    l.seed = options.seed;
    l.keep_text = options.verify > 0;
    if (concurrency == 0 && rate == 0) {
      for (const double at : workload.arrivals) l.due.push_back(at / options.time_scale);
      l.requests = static_cast<int>(l.due.size());
    }
    return l;
  }

  Result<Run> once(const Workload& workload, LoadOptions l, double rate, const std::string& what) const {
    if (rate > 0) {
      ArrivalOptions a = options.arrival;
      a.rate = rate;
      a.seed = options.seed;
      KVASIR_ASSIGN(l.due, arrivals(a, l.requests));
    }
    return run_load(target, workload, l, stop, [&](const Progress& p) {
      if (progress) progress(what, p);
    });
  }

  // The highest load within the SLO: double while it holds, then halve the gap.
  Status sweep(const Workload& workload, Bench& b) const {
    const bool by_rate = options.sweep == "rate";
    const double seconds = options.duration > 0 ? options.duration : 15;
    double good = 0, bad = 0, load_now = options.sweep_low;
    for (int probe = 0; probe < 14 && !stop; ++probe) {
      if (!by_rate) load_now = std::round(load_now);
      const int concurrency = by_rate ? 0 : static_cast<int>(load_now);
      LoadOptions l = load(workload, by_rate ? load_now : 0, concurrency, kMaxRequests);
      l.duration = seconds;
      l.requests = by_rate ? static_cast<int>(std::clamp(load_now * seconds, 10.0, 1e6)) : kMaxRequests;
      KVASIR_ASSIGN(b.run,
                    once(workload, std::move(l), by_rate ? load_now : 0, options.sweep + " " + short_number(load_now)));
      Point p{load_now, figures_of(b.run, options.slo), false};
      p.within = !p.figures.partial && p.figures.good > 0 && p.figures.within_slo >= options.slo_share;
      (p.within ? good : bad) = load_now;
      b.report.figures = p.figures;
      const bool gone = p.figures.partial;
      b.report.points.push_back(std::move(p));
      if (gone) break;
      if (bad == 0) {
        if (load_now >= options.sweep_high) break;
        load_now = std::min(load_now * 2, options.sweep_high);
      } else if (good == 0) {
        if (!by_rate && load_now <= 1) break;
        load_now = by_rate ? load_now / 2 : std::floor(load_now / 2);
      } else {
        if (bad - good <= (by_rate ? good * 0.05 : 1)) break;
        load_now = (good + bad) / 2;
      }
    }
    b.report.best = good;
    for (const Point& p : b.report.points) {
      if (p.load == good) b.report.figures = p.figures;
    }
    return {};
  }
};

}  // namespace

Result<Bench> run_bench(Target& target, const BenchOptions& o, const std::atomic<bool>& stop,
                        const OnProgress& progress) {
  const int wanted = o.duration > 0 && o.requests <= 0 ? 10'000 : std::max(1, o.requests);
  KVASIR_ASSIGN(const Workload workload, make_workload(o.workload, wanted));
  const bool replay = !workload.arrivals.empty() && o.rate == 0 && o.sweep.empty();
  const bool open = o.rate > 0 || replay;
  Driver driver{target, o, stop, progress};
  Bench b;
  Report& r = b.report;
  r.sweep = o.sweep;
  r.settings = {
      {"protocol", o.target.protocol},
      {"address", o.target.address},
      {"load", !o.sweep.empty() ? "sweep of " + o.sweep
               : replay         ? "replay of " + o.workload.file
               : open           ? "open loop, " + o.arrival.pattern + " at " + short_number(o.rate) + " a second"
                                : "closed loop, " + std::to_string(o.concurrency) + " clients"},
      {"prompts", !o.workload.file.empty() ? o.workload.file : o.workload.input_length + " words"},
      {"output", o.workload.output_length + (o.ignore_eos ? " tokens, past the end of text" : " tokens at most")},
      {"shared prefix",
       std::to_string(o.workload.shared_prefix) + " words in " + std::to_string(o.workload.prefix_groups) + " groups"},
      {"temperature", short_number(o.temperature)},
      {"seed", std::to_string(o.seed)}};
  r.title = "kvasir bench: " + o.target.address;
  r.server_before = target.server_figures();
  if (!o.sweep.empty()) {
    KVASIR_TRY(driver.sweep(workload, b));
  } else {
    const int requests = o.duration > 0 && o.requests <= 0 ? kMaxRequests : wanted;
    LoadOptions l = driver.load(workload, o.rate, open ? 0 : o.concurrency, requests);
    if (open && o.duration > 0 && o.rate > 0)
      l.requests = std::min(requests, static_cast<int>(o.duration * o.rate * 2) + 10);
    KVASIR_ASSIGN(b.run, driver.once(workload, l, o.rate, "load"));
    r.figures = figures_of(b.run, o.slo);
    if (o.verify > 0 && !stop) r.verification = verify(target, workload, l, b.run, o.verify, stop);
  }
  r.server_after = target.server_figures();
  return b;
}

}  // namespace kvasir::client
