#include <algorithm>
#include <cstdio>

#include "client/plot.h"
#include "client/report.h"

namespace kvasir::client {
namespace {

constexpr const char* kStyle =
    "body{font:15px/1.45 system-ui,sans-serif;max-width:1180px;margin:2em auto;padding:0 "
    "1em;color:#111;background:#fff}"
    "h1{font-size:1.5em;margin:0}h2{font-size:1.1em;margin:1.6em 0 .5em}.sub{color:#666}"
    ".cards{display:flex;flex-wrap:wrap;gap:12px;margin:1em 0}.card{border:1px solid "
    "#ddd;border-radius:8px;padding:.6em 1em}"
    ".card b{display:block;font-size:1.35em}.card span{color:#666;font-size:.85em}.bad b{color:#b91c1c}"
    "table{border-collapse:collapse}td,th{padding:.25em .8em;text-align:right;border-bottom:1px solid #eee}"
    "td:first-child,th:first-child{text-align:left}"
    ".plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(430px,1fr));gap:14px}"
    "svg{width:100%;border:1px solid #e5e5e5;border-radius:8px}svg text{font:11px system-ui,sans-serif;fill:#555}"
    "svg .t{font-size:13px;font-weight:600;fill:#111}svg .g{stroke:#eee}"
    "@media(prefers-color-scheme:dark){body{background:#111;color:#eee}.card,svg{border-color:#333}"
    "td,th{border-color:#2a2a2a}svg text{fill:#aaa}svg .t{fill:#eee}svg .g{stroke:#2a2a2a}}";

std::string number(double v, int digits = 1) {
  char buffer[48];
  std::snprintf(buffer, sizeof buffer, "%.*f", digits, v);
  return buffer;
}

std::string short_number(double v) {
  char buffer[48];
  std::snprintf(buffer, sizeof buffer, "%.6g", v);
  return buffer;
}

std::string card(const std::string& value, const std::string& what, bool bad = false) {
  return std::string("<div class='card") + (bad ? " bad" : "") + "'><b>" + html_escaped(value) + "</b><span>" +
         html_escaped(what) + "</span></div>";
}

std::string spread_row(const char* name, const Spread& s) {
  std::string t = std::string("<tr><td>") + name + "</td>";
  for (const double v : {s.mean, s.p50, s.p90, s.p95, s.p99, s.max}) t += "<td>" + number(v * 1e3, 2) + "</td>";
  return t + "</tr>";
}

PlotLine curve(const char* name, const Spread& s) {  // share of requests against milliseconds
  PlotLine line{name, {}};
  for (size_t p = 0; p < s.curve.size(); ++p) line.points.emplace_back(s.curve[p] * 1e3, static_cast<double>(p));
  return line;
}

std::string latency_plots(const Figures& f) {
  return svg_of({"Time to first token", "milliseconds", "% of requests", {curve("TTFT", f.ttft)}, false}) +
         svg_of({"Between tokens", "milliseconds", "% of gaps", {curve("ITL", f.itl)}, false}) +
         svg_of({"End to end", "milliseconds", "% of requests", {curve("E2E", f.e2e)}, false});
}

std::string timeline_plots(const Figures& f) {
  PlotLine tokens{"output tokens", {}}, running{"under way", {}}, started{"started", {}}, finished{"finished", {}},
      failed{"failed", {}};
  for (size_t i = 0; i < f.timeline.size(); ++i) {
    const Second& s = f.timeline[i];
    const double x = static_cast<double>(i);
    tokens.points.emplace_back(x, static_cast<double>(s.tokens));
    running.points.emplace_back(x, s.running);
    started.points.emplace_back(x, s.started);
    finished.points.emplace_back(x, s.finished);
    failed.points.emplace_back(x, s.failed);
  }
  return svg_of({"Output tokens a second", "seconds", "tokens", {tokens}, false}) +
         svg_of({"Requests under way", "seconds", "requests", {running}, false}) +
         svg_of({"Requests a second", "seconds", "requests", {started, finished, failed}, false});
}

std::string sweep_plots(const Report& r) {
  std::vector<Point> points = r.points;
  std::sort(points.begin(), points.end(), [](const Point& a, const Point& b) { return a.load < b.load; });
  PlotLine throughput{"", {}}, ttft50{"TTFT p50", {}}, ttft99{"TTFT p99", {}}, itl50{"ITL p50", {}},
      itl99{"ITL p99", {}}, trade{"", {}};
  for (const Point& p : points) {
    throughput.points.emplace_back(p.load, p.figures.output_per_second);
    ttft50.points.emplace_back(p.load, p.figures.ttft.p50 * 1e3);
    ttft99.points.emplace_back(p.load, p.figures.ttft.p99 * 1e3);
    itl50.points.emplace_back(p.load, p.figures.itl.p50 * 1e3);
    itl99.points.emplace_back(p.load, p.figures.itl.p99 * 1e3);
    trade.points.emplace_back(p.figures.output_per_second, p.figures.e2e.p50 * 1e3);
  }
  return svg_of({"Throughput", r.sweep, "output tokens a second", {throughput}, true}) +
         svg_of({"Time to first token", r.sweep, "milliseconds", {ttft50, ttft99}, true}) +
         svg_of({"Between tokens", r.sweep, "milliseconds", {itl50, itl99}, true}) +
         svg_of({"Latency against throughput", "output tokens a second", "end to end p50, ms", {trade}, true});
}

// A table of what changed on the server's side, and a plot of each figure that goes up and down.
std::string server_part(const Report& r) {
  constexpr size_t kMostPlots = 6;
  if (r.server.size() < 2) return {};
  const ServerFigures &before = r.server.front().figures, &after = r.server.back().figures;
  std::string rows, plots;
  size_t drawn = 0;
  for (const auto& [name, value] : after) {
    PlotLine line{name, {}};
    bool rises = false, falls = false;
    for (const ServerSample& s : r.server) {
      const auto at = s.figures.find(name);
      if (at == s.figures.end()) continue;
      if (!line.points.empty()) {
        rises |= at->second > line.points.back().second;
        falls |= at->second < line.points.back().second;
      }
      line.points.emplace_back(s.at, at->second);
    }
    if (!rises && !falls) continue;
    const auto first = before.find(name);
    const double was = first == before.end() ? 0 : first->second;
    rows += "<tr><td>" + html_escaped(name) + "</td><td>" + short_number(was) + "</td><td>" + short_number(value) +
            "</td><td>" + short_number(value - was) + "</td></tr>";
    if (rises && falls && drawn++ < kMostPlots) plots += svg_of({name, "seconds", "", {std::move(line)}, false});
  }
  if (rows.empty()) return {};
  return "<h2>The server's own figures</h2><div class='plots'>" + plots +
         "</div><table><tr><th></th><th>before</th><th>after</th><th>change</th></tr>" + rows + "</table>";
}

}  // namespace

std::string html_escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&#39;"; break;
      default: out += c;
    }
  }
  return out;
}

std::string html_of(const Report& r) {
  const Figures& f = r.figures;
  std::string h =
      "<!doctype html><html lang='en'><meta charset='utf-8'>"
      "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none';style-src 'unsafe-inline'\">"
      "<meta name='viewport' content='width=device-width'><title>" +
      html_escaped(r.title) + "</title><style>" + kStyle + "</style><h1>" + html_escaped(r.title) +
      "</h1><p class='sub'>" + html_escaped(r.date) + "<br><code>" + html_escaped(r.command) + "</code></p>";
  if (f.partial) h += "<p><b>Cut short:</b> " + html_escaped(f.why) + "</p>";
  h += "<div class='cards'>" + card(number(f.output_per_second), "output tokens a second") +
       card(number(f.requests_per_second, 2), "requests a second") +
       card(number(f.ttft.p50 * 1e3) + " ms", "time to first token, p50") +
       card(number(f.itl.p99 * 1e3) + " ms", "between tokens, p99") +
       card(std::to_string(f.good) + " of " + std::to_string(f.requests), "requests answered", f.failed > 0) +
       card(number(f.within_slo * 100) + "%", "within the SLO");
  if (r.best > 0) h += card(number(r.best, 2), "highest " + r.sweep + " within the SLO");
  if (r.verification.compared > 0) {
    const Verification& v = r.verification;
    h += card(std::to_string(v.equal) + " of " + std::to_string(v.compared),
              "same alone as under load; " + std::to_string(v.near_ties) + " near-ties", v.different + v.failed > 0);
  }
  h += "</div><table><tr><th>milliseconds</th><th>mean</th><th>p50</th><th>p90</th><th>p95</th><th>p99</th><th>max</th>"
       "</tr>" +
       spread_row("time to first token", f.ttft) + spread_row("between tokens", f.itl) +
       spread_row("per output token", f.tpot) + spread_row("end to end", f.e2e) +
       spread_row("sent late (client)", f.late) + "</table>";
  if (!r.points.empty()) h += "<h2>Sweep</h2><div class='plots'>" + sweep_plots(r) + "</div>";
  h += "<h2>Latency</h2><div class='plots'>" + latency_plots(f) + "</div>";
  h += "<h2>Over time</h2><div class='plots'>" + timeline_plots(f) + "</div>";
  h += server_part(r);
  if (!f.errors.empty()) {
    h += "<h2>Errors</h2><table>";
    for (const auto& [cause, count] : f.errors) {
      h += "<tr><td>" + html_escaped(cause) + "</td><td>" + std::to_string(count) + "</td></tr>";
    }
    h += "</table>";
  }
  for (const std::string& example : r.verification.examples) h += "<p class='sub'>" + html_escaped(example) + "</p>";
  h += "<h2>Settings</h2><table>";
  for (const auto& [name, value] : r.settings) {
    h += "<tr><td>" + html_escaped(name) + "</td><td>" + html_escaped(value) + "</td></tr>";
  }
  return h + "</table></html>\n";
}

}  // namespace kvasir::client
