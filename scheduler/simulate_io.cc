// Workloads in, reports and a plot out.
#include <cstdio>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/cat.h"
#include "scheduler/simulate.h"

namespace kvasir::scheduler {
namespace {

using nlohmann::json;

// Of one value of a workload: what a simulated clock and a prompt of token ids can hold.
constexpr double kMostSeconds = 1e8, kMostTokens = 1 << 24, kMostId = 1e12;

json to_object(const Percentiles& p) { return {{"p50", p.p50}, {"p90", p.p90}, {"p99", p.p99}, {"mean", p.mean}}; }

Status at_line(size_t line, const std::string& message) { return invalid_argument(cat("line ", line, ": ", message)); }

Status read_item(const json& j, WorkItem* w) {
  for (const auto& item : j.items()) {
    const std::string& name = item.key();  // not bindings: clang 14 cannot capture those
    const json& v = item.value();
    auto number = [&](auto* out, double least, double most) -> Status {
      if (!v.is_number() || !(v.template get<double>() >= least && v.template get<double>() <= most))
        return invalid_argument(cat(name, " is ", v.dump(), "; it must be a number from ", least, " to ",
                                    static_cast<int64_t>(most)))
            .with_field(name);
      *out = v.template get<double>();
      return {};
    };
    double x = 0;
    if (name == "arrival_s") {
      KVASIR_TRY(number(&w->arrival_s, 0, kMostSeconds));
    } else if (name == "prompt_tokens") {
      KVASIR_TRY(number(&x, 1, kMostTokens));
      w->prompt_tokens = static_cast<int64_t>(x);
    } else if (name == "output_tokens") {
      KVASIR_TRY(number(&x, 0, kMostTokens));
      w->output_tokens = static_cast<int64_t>(x);
    } else if (name == "priority") {
      KVASIR_TRY(number(&x, -1000, 1000));
      w->priority = static_cast<int32_t>(x);
    } else if (name == "deadline_s") {
      KVASIR_TRY(number(&x, 0, kMostSeconds));
      w->deadline_s = x;
    } else if (name == "cancel_at_s") {
      KVASIR_TRY(number(&x, 0, kMostSeconds));
      w->cancel_at_s = x;
    } else if (name == "conversation") {
      KVASIR_TRY(number(&x, 0, kMostId));
      w->conversation = static_cast<int64_t>(x);
    } else if (name == "follows") {
      KVASIR_TRY(number(&x, 0, kMostId));
      w->follows = static_cast<int64_t>(x);
    } else if (name == "tenant") {
      if (!v.is_string())
        return invalid_argument(cat("tenant is ", v.dump(), "; it must be a string")).with_field(name);
      w->tenant = v.get<std::string>();
    } else if (name == "prefix_ids") {
      if (!v.is_array()) return invalid_argument("prefix_ids must be a list of integers").with_field(name);
      for (const json& id : v) {
        if (!id.is_number_integer()) return invalid_argument("prefix_ids must be a list of integers").with_field(name);
        w->prefix_ids.push_back(id.get<int64_t>());
      }
    } else {
      return invalid_argument(cat("\"", name,
                                  "\" is not known; arrival_s, prompt_tokens, output_tokens, prefix_ids, "
                                  "tenant, priority, deadline_s, cancel_at_s, conversation and follows are"))
          .with_field(name);
    }
  }
  if (w->prompt_tokens < 1) return invalid_argument("prompt_tokens is missing").with_field("prompt_tokens");
  return {};
}

}  // namespace

Result<SimWorkload> parse_workload(const std::string& jsonl) {
  SimWorkload w;
  std::istringstream lines(jsonl);
  std::string text;
  double last = 0;
  for (size_t line = 1; std::getline(lines, text); ++line) {
    if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
    json j = json::parse(text, nullptr, false);
    if (!j.is_object()) return at_line(line, "this is not a JSON object");
    WorkItem item;
    if (Status s = read_item(j, &item); !s.ok()) return at_line(line, s.message());
    if (item.follows >= static_cast<int64_t>(w.items.size()))
      return at_line(line, cat("follows is ", item.follows, "; it must name an earlier request, counted from 0"));
    if (item.follows < 0) {
      if (item.arrival_s < last)
        return at_line(line,
                       cat("arrival_s is ", item.arrival_s, ", before the ", last, " of an earlier line; sort them"));
      last = item.arrival_s;
    }
    w.items.push_back(std::move(item));
  }
  if (w.items.empty()) return invalid_argument("the workload has no requests");
  return w;
}

std::string to_json(const std::vector<SimReport>& reports) {
  json all = json::array();
  for (const SimReport& r : reports) {
    json tenants = json::array();
    for (const TenantReport& t : r.tenants)
      tenants.push_back({{"tenant", t.name},
                         {"finished", t.finished},
                         {"output_tokens", t.output_tokens},
                         {"ttft_s", to_object(t.ttft_s)}});
    all.push_back({{"policy", r.policy},
                   {"simulated_s", r.simulated_s},
                   {"wall_s", r.wall_s},
                   {"requests", r.requests},
                   {"finished", r.finished},
                   {"refused", r.refused},
                   {"expired", r.expired},
                   {"cancelled", r.cancelled},
                   {"steps", r.steps},
                   {"steps_cut", r.steps_cut},
                   {"preemptions", r.preemptions},
                   {"swaps", r.swaps},
                   {"prompt_tokens", r.prompt_tokens},
                   {"cached_tokens", r.cached_tokens},
                   {"output_tokens", r.output_tokens},
                   {"output_tokens_per_s", r.output_tokens_per_s},
                   {"goodput_tokens_per_s", r.goodput_tokens_per_s},
                   {"hit_rate", r.hit_rate},
                   {"page_use", {{"mean", r.page_use_mean}, {"peak", r.page_use_peak}}},
                   {"fairness", r.fairness},
                   {"longest_wait_s", r.longest_wait_s},
                   {"ttft_s", to_object(r.ttft_s)},
                   {"itl_s", to_object(r.itl_s)},
                   {"latency_s", to_object(r.latency_s)},
                   {"tenants", tenants}});
  }
  return all.dump(2);
}

// One row of bars a figure, one bar a policy.
std::string to_svg(const std::vector<SimReport>& reports) {
  struct Figure {
    const char* title;
    double (*of)(const SimReport&);
  };
  const Figure figures[] = {
      {"goodput, output tokens/s", [](const SimReport& r) { return r.goodput_tokens_per_s; }},
      {"TTFT p50, s", [](const SimReport& r) { return r.ttft_s.p50; }},
      {"TTFT p99, s", [](const SimReport& r) { return r.ttft_s.p99; }},
      {"ITL p99, s", [](const SimReport& r) { return r.itl_s.p99; }},
      {"prefix hit rate", [](const SimReport& r) { return r.hit_rate; }},
      {"preemptions", [](const SimReport& r) { return double(r.preemptions); }},
      {"fairness between tenants", [](const SimReport& r) { return r.fairness; }},
  };
  const int row = 18, gap = 30, left = 90, width = 360;
  const int figure_height = gap + row * static_cast<int>(reports.size());
  const int height = 10 + figure_height * static_cast<int>(std::size(figures));
  std::string svg =
      cat("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"", left + width + 90, "\" height=\"", height,
          "\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n");
  int y = 4;
  for (const Figure& f : figures) {
    double most = 1e-12;
    for (const SimReport& r : reports) most = std::max(most, f.of(r));
    svg += cat("<text x=\"8\" y=\"", y + 16, "\" font-weight=\"bold\">", f.title, "</text>\n");
    y += gap - 8;
    for (const SimReport& r : reports) {
      char value[32];
      std::snprintf(value, sizeof value, "%.4g", f.of(r));
      const int w = static_cast<int>(width * f.of(r) / most);
      svg += cat("<text x=\"", left - 6, "\" y=\"", y + 12, "\" text-anchor=\"end\">", r.policy, "</text><rect x=\"",
                 left, "\" y=\"", y + 1, "\" width=\"", w, "\" height=\"", row - 4, "\" fill=\"#3b6ea5\"/><text x=\"",
                 left + w + 5, "\" y=\"", y + 12, "\">", value, "</text>\n");
      y += row;
    }
    y += 8;
  }
  return svg + "</svg>\n";
}

}  // namespace kvasir::scheduler
