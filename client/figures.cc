#include "client/figures.h"

#include <algorithm>
#include <numeric>

namespace kvasir::client {
namespace {

// Of sorted values, by linear interpolation between the two nearest.
double percentile(const std::vector<double>& sorted, double p) {
  if (sorted.empty()) return 0;
  const double at = p / 100 * static_cast<double>(sorted.size() - 1);
  const size_t low = static_cast<size_t>(at);
  const size_t high = std::min(low + 1, sorted.size() - 1);
  return sorted[low] + (sorted[high] - sorted[low]) * (at - static_cast<double>(low));
}

constexpr size_t kMostSeconds = 24 * 3600;

// A request in the seconds that it was there.
void add_to_timeline(const Record& r, std::vector<Second>& timeline) {
  const auto second = [&](double at) -> Second& {
    return timeline[std::min(timeline.size() - 1, static_cast<size_t>(std::max(at, 0.0)))];
  };
  second(r.sent).started++;
  // At an instant, the middle of the second: all that touch it would be more than ever were there at once.
  for (size_t s = static_cast<size_t>(r.sent); static_cast<double>(s) + 0.5 < r.end && s < timeline.size(); ++s)
    if (static_cast<double>(s) + 0.5 >= r.sent) timeline[s].running++;
  if (r.first >= 0) {
    double at = r.first;
    second(at).tokens += r.counts[0];
    for (size_t i = 0; i < r.gaps.size(); ++i) second(at += r.gaps[i]).tokens += r.counts[i + 1];
  }
  ++(r.status.ok() ? second(r.end).finished : second(r.end).failed);
}

}  // namespace

Result<Slo> parse_slo(const std::string& text) {
  Slo slo;
  size_t at = 0;
  while (at < text.size()) {
    const size_t end = std::min(text.find(',', at), text.size());
    const std::string part = text.substr(at, end - at);
    at = end + 1;
    const size_t equals = part.find('=');
    const std::string name = part.substr(0, equals);
    double* target = name == "ttft" ? &slo.ttft : name == "itl" ? &slo.itl : name == "e2e" ? &slo.e2e : nullptr;
    char* unit = nullptr;
    const double value = equals == std::string::npos ? 0 : std::strtod(part.c_str() + equals + 1, &unit);
    const std::string u = unit ? unit : "";
    if (!target || !(value > 0) || (u != "ms" && u != "s")) {
      return invalid_argument("slo has \"" + part + "\"; write ttft=500ms,itl=50ms,e2e=10s (any of them)");
    }
    *target = u == "ms" ? value / 1000 : value;
  }
  return slo;
}

Spread spread_of(std::vector<double> v) {
  Spread s;
  s.count = static_cast<int64_t>(v.size());
  if (v.empty()) return s;
  std::sort(v.begin(), v.end());
  s.mean = std::accumulate(v.begin(), v.end(), 0.0) / static_cast<double>(v.size());
  s.p50 = percentile(v, 50);
  s.p90 = percentile(v, 90);
  s.p95 = percentile(v, 95);
  s.p99 = percentile(v, 99);
  s.max = v.back();
  for (int p = 0; p <= 100; ++p) s.curve.push_back(percentile(v, p));
  return s;
}

Figures figures_of(const LoadRun& run, const Slo& slo) {
  Figures f;
  f.requests = static_cast<int>(run.records.size());
  f.partial = run.partial;
  f.why = run.why;
  std::vector<double> ttft, itl, tpot, e2e, late;
  double last_end = 0;
  int within = 0;
  f.timeline.resize(std::min(kMostSeconds, static_cast<size_t>(run.seconds) + 1));
  for (const Record& r : run.records) {
    add_to_timeline(r, f.timeline);
    last_end = std::max(last_end, r.end);
    late.push_back(r.sent - r.due);
    const int64_t output = output_of(r);
    f.output_tokens += output;
    f.prompt_tokens += std::max<int64_t>(r.usage.prompt_tokens, 0);
    f.cached_tokens += std::max<int64_t>(r.usage.cached_tokens, 0);
    if (!r.status.ok()) {
      ++f.failed;
      ++f.errors[std::string(code_name(r.status.code())) + ": " + r.status.message().substr(0, 120)];
      continue;
    }
    ++f.good;
    const double total = r.end - r.due;
    e2e.push_back(total);
    bool good = slo.e2e == 0 || total <= slo.e2e;
    if (r.first >= 0) {
      ttft.push_back(r.first - r.due);
      good = good && (slo.ttft == 0 || r.first - r.due <= slo.ttft);
      for (const float gap : r.gaps) itl.push_back(gap);
      if (output > 1) {
        // To the last token, not to the end of the call.
        const double decode = std::accumulate(r.gaps.begin(), r.gaps.end(), 0.0);
        const double each = decode / static_cast<double>(output - r.counts[0] > 0 ? output - r.counts[0] : 1);
        tpot.push_back(each);
        good = good && (slo.itl == 0 || each <= slo.itl);
      }
    }
    within += good;
  }
  f.seconds = last_end > 0 ? last_end : run.seconds;
  f.ttft = spread_of(std::move(ttft));
  f.itl = spread_of(std::move(itl));
  f.tpot = spread_of(std::move(tpot));
  f.e2e = spread_of(std::move(e2e));
  f.late = spread_of(std::move(late));
  if (f.seconds > 0) {
    f.requests_per_second = f.good / f.seconds;
    f.output_per_second = static_cast<double>(f.output_tokens) / f.seconds;
    f.total_per_second = static_cast<double>(f.output_tokens + f.prompt_tokens) / f.seconds;
    f.goodput = within / f.seconds;
  }
  f.within_slo = f.requests ? static_cast<double>(within) / f.requests : 0;
  return f;
}

}  // namespace kvasir::client
