#include "client/report.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <nlohmann/json.hpp>

namespace kvasir::client {
namespace {

using Json = nlohmann::ordered_json;

__attribute__((format(printf, 1, 2))) std::string print(const char* format, ...) {
  va_list args;
  va_start(args, format);
  char buffer[512];
  std::vsnprintf(buffer, sizeof buffer, format, args);
  va_end(args);
  return buffer;
}

Json spread_json(const Spread& s) {
  Json j = {{"count", s.count}};
  const std::pair<const char*, double> parts[] = {{"mean", s.mean}, {"p50", s.p50}, {"p90", s.p90},
                                                  {"p95", s.p95},   {"p99", s.p99}, {"max", s.max}};
  for (const auto& [name, seconds] : parts) j[name] = seconds * 1000;
  Json curve = Json::array();
  for (const double v : s.curve) curve.push_back(v * 1000);
  j["percentiles"] = std::move(curve);
  return j;
}

Json figures_json(const Figures& f) {
  Json j = {{"requests", f.requests},
            {"succeeded", f.good},
            {"failed", f.failed},
            {"seconds", f.seconds},
            {"partial", f.partial},
            {"prompt_tokens", f.prompt_tokens},
            {"cached_tokens", f.cached_tokens},
            {"output_tokens", f.output_tokens},
            {"requests_per_second", f.requests_per_second},
            {"output_tokens_per_second", f.output_per_second},
            {"total_tokens_per_second", f.total_per_second},
            {"goodput_requests_per_second", f.goodput},
            {"share_within_slo", f.within_slo},
            {"ttft_ms", spread_json(f.ttft)},
            {"itl_ms", spread_json(f.itl)},
            {"tpot_ms", spread_json(f.tpot)},
            {"e2e_ms", spread_json(f.e2e)},
            {"sent_late_ms", spread_json(f.late)}};
  if (f.partial) j["why_partial"] = f.why;
  j["errors"] = Json::object();
  for (const auto& [cause, count] : f.errors) j["errors"][cause] = count;
  j["timeline"] = Json::array();
  for (const Second& s : f.timeline) {
    j["timeline"].push_back({{"started", s.started},
                             {"finished", s.finished},
                             {"failed", s.failed},
                             {"running", s.running},
                             {"tokens", s.tokens}});
  }
  return j;
}

std::string spread_row(const char* name, const Spread& s) {
  return print("  %-22s %9.2f %9.2f %9.2f %9.2f %9.2f %9.2f\n", name, s.mean * 1e3, s.p50 * 1e3, s.p90 * 1e3,
               s.p95 * 1e3, s.p99 * 1e3, s.max * 1e3);
}

}  // namespace

std::string table_of(const Figures& f) {
  std::string t;
  t += print("  %-22s %d good, %d failed of %d in %.1f s%s\n", "requests", f.good, f.failed, f.requests, f.seconds,
             f.partial ? " (cut short)" : "");
  t += print("  %-22s %lld prompt (%lld cached), %lld output\n", "tokens", static_cast<long long>(f.prompt_tokens),
             static_cast<long long>(f.cached_tokens), static_cast<long long>(f.output_tokens));
  t += print("  %-22s %.2f requests, %.1f output tokens, %.1f tokens in all\n", "a second", f.requests_per_second,
             f.output_per_second, f.total_per_second);
  t += print("  %-22s %9s %9s %9s %9s %9s %9s\n", "milliseconds", "mean", "p50", "p90", "p95", "p99", "max");
  t += spread_row("time to first token", f.ttft);
  t += spread_row("between tokens", f.itl);
  t += spread_row("per output token", f.tpot);
  t += spread_row("end to end", f.e2e);
  if (f.late.p99 > 0.01) t += spread_row("sent late (client)", f.late);
  for (const auto& [cause, count] : f.errors) t += "  " + std::to_string(count) + " x " + cause + "\n";
  if (f.partial) t += "  cut short: " + f.why + "\n";
  return t;
}

std::string server_table(const Report& r) {
  if (r.server.empty()) return {};
  const ServerFigures &before = r.server.front().figures, &after = r.server.back().figures;
  std::string t;
  for (const auto& [name, value] : after) {
    double most = value;
    for (const ServerSample& s : r.server) {
      if (const auto at = s.figures.find(name); at != s.figures.end()) most = std::max(most, at->second);
    }
    const auto first = before.find(name);
    const double was = first == before.end() ? 0 : first->second;
    if (value == was && most == was) continue;
    t += print("    %-48.48s %14.6g -> %-14.6g at most %.6g\n", name.c_str(), was, value, most);
  }
  return t.empty() ? t : "  the server's own figures, before -> after\n" + t;
}

std::string json_of(const Report& r) {
  Json j = {{"tool", "kvasir bench"}, {"title", r.title}, {"date", r.date}, {"command", r.command}};
  j["settings"] = Json::object();
  for (const auto& [name, value] : r.settings) j["settings"][name] = value;
  j["figures"] = figures_json(r.figures);
  j["server"] = Json::array();
  for (const ServerSample& sample : r.server) {
    Json one = {{"seconds", sample.at}};
    for (const auto& [name, value] : sample.figures) one[name] = value;
    j["server"].push_back(std::move(one));
  }
  if (r.verification.compared > 0) {
    const Verification& v = r.verification;
    j["verification"] = {{"compared", v.compared},   {"equal", v.equal},   {"near_ties", v.near_ties},
                         {"different", v.different}, {"failed", v.failed}, {"examples", v.examples}};
  }
  if (!r.points.empty()) {
    j["sweep"] = {{"of", r.sweep}, {"best", r.best}, {"points", Json::array()}};
    for (const Point& p : r.points) {
      Json f = figures_json(p.figures);
      f.erase("timeline");
      j["sweep"]["points"].push_back({{"load", p.load}, {"within_slo", p.within}, {"figures", std::move(f)}});
    }
  }
  return j.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string csv_of(const LoadRun& run) {
  std::string out =
      "prompt,turn,due_s,sent_s,first_s,end_s,prompt_tokens,cached_tokens,output_tokens,max_gap_ms,status\n";
  for (const Record& r : run.records) {
    float most = 0;
    for (const float gap : r.gaps) most = std::max(most, gap);
    out += print("%d,%d,%.6f,%.6f,%.6f,%.6f,%lld,%lld,%lld,%.3f,%s\n", r.prompt, r.turn, r.due, r.sent, r.first, r.end,
                 static_cast<long long>(r.usage.prompt_tokens), static_cast<long long>(r.usage.cached_tokens),
                 static_cast<long long>(output_of(r)), most * 1e3, code_name(r.status.code()));
  }
  return out;
}

std::string answers_of(const Workload& workload, const LoadRun& run) {
  std::string out;
  for (const Record& r : run.records) {
    const Prompt& p = prompt_of(workload, r);
    Json j = {{"prompt", r.asked.empty() ? p.text : r.asked}, {"answer", r.text}, {"output_tokens", output_of(r)}};
    if (!r.status.ok()) j["error"] = r.status.to_string();
    out += j.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  }
  return out;
}

Result<std::string> compare(const std::string& json_a, const std::string& json_b) {
  const Json a = Json::parse(json_a, nullptr, false), b = Json::parse(json_b, nullptr, false);
  if (!a.is_object() || !a.contains("figures")) return invalid_argument("the first file is no report of kvasir bench");
  if (!b.is_object() || !b.contains("figures")) return invalid_argument("the second file is no report of kvasir bench");
  std::string t = print("  %-28s %12s %12s %9s\n", "", "A", "B", "B / A");
  const auto row = [&](const std::string& name, double x, double y) {
    t += print("  %-28s %12.2f %12.2f %9s\n", name.c_str(), x, y, x > 0 ? print("%.3f", y / x).c_str() : "-");
  };
  const auto number = [](const Json& j, const char* key) {
    return j.contains(key) && j[key].is_number() ? j[key].get<double>() : 0.0;
  };
  const Json &fa = a["figures"], &fb = b["figures"];
  for (const char* key : {"succeeded", "failed", "requests_per_second", "output_tokens_per_second",
                          "total_tokens_per_second", "goodput_requests_per_second", "share_within_slo"}) {
    row(key, number(fa, key), number(fb, key));
  }
  for (const char* key : {"ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"}) {
    if (!fa.contains(key) || !fb.contains(key)) continue;
    for (const char* part : {"p50", "p90", "p99"}) {
      row(std::string(key) + " " + part, number(fa[key], part), number(fb[key], part));
    }
  }
  return t;
}

}  // namespace kvasir::client
