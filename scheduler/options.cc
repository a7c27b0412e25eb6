#include "scheduler/options.h"

#include "core/cat.h"
#include "kvcache/view.h"

namespace kvasir::scheduler {
namespace {

Status wrong(const char* field, const std::string& message) {
  return invalid_argument(cat(field, " ", message)).with_field(field);
}

}  // namespace

Status Settings::validate() const {
  if (page_size < 1 || page_size > kvcache::kMostPageTokens)
    return wrong("page_size", cat("is ", page_size, "; it must be from 1 to ", kvcache::kMostPageTokens));
  if (groups.empty() || groups.size() > 4) return wrong("groups", cat("has ", groups.size(), " entries; 1 to 4 work"));
  for (size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].pages < 2)
      return wrong("kv_memory",
                   cat("leaves ", groups[g].pages, " pages for layer group ", g, "; at least 2 are needed"));
    if (groups[g].window < 0) return wrong("window", cat("is ", groups[g].window, "; it must not be negative"));
    if (groups[g].sinks < 0 || (groups[g].sinks > 0 && groups[g].sinks >= groups[g].window))
      return wrong("sinks",
                   cat("is ", groups[g].sinks, "; sinks are counted inside the window, which is ", groups[g].window));
    if (groups[g].sinks > 0 && groups.size() > 1) return wrong("sinks", "need a model with one layer group");
    if (g > 0 && groups[g].window == 0) return wrong("groups", "may have full attention in group 0 only");
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    const int64_t least = (groups[g].window + max_tokens_per_step) / page_size + 2 + (groups[g].sinks > 0);
    if (groups[g].window > 0 && groups[g].pages < least)
      return wrong("kv_memory", cat("leaves ", groups[g].pages, " pages for layer group ", g, "; its window of ",
                                    groups[g].window, " and a step need ", least));
  }
  if (max_context < 2) return wrong("max_context", cat("is ", max_context, "; at least 2 are needed"));
  if (max_running < 1) return wrong("max_running", cat("is ", max_running, "; at least 1 is needed"));
  if (max_tokens_per_step < int64_t(max_running) + page_size)
    return wrong("max_tokens_per_step",
                 cat("is ", max_tokens_per_step, "; it must be at least max_running + page_size (",
                     int64_t(max_running) + page_size, "), or prefills would wait for ever"));
  if (!(max_step_ms == 0 || (max_step_ms >= 1 && max_step_ms <= 60000)))
    return wrong("max_step_ms", cat("is ", max_step_ms, "; it must be 0 (no bound), or from 1 to 60000"));
  if (depth < 1 || depth > 2) return wrong("depth", cat("is ", depth, "; 1 or 2 plans may be in flight"));
  if (lookahead_tokens < 0) return wrong("lookahead_tokens", cat("is ", lookahead_tokens, "; it must not be negative"));
  if (max_draft < 0) return wrong("max_draft", cat("is ", max_draft, "; it must not be negative"));
  if (max_waiting < 1) return wrong("max_waiting", cat("is ", max_waiting, "; at least 1 is needed"));
  if (max_waiting_tokens < 1)
    return wrong("max_waiting_tokens", cat("is ", max_waiting_tokens, "; at least 1 is needed"));
  for (const auto& [name, value] : {std::pair("max_wait_s", max_wait_s),
                                    {"max_wait_answers", max_wait_answers},
                                    {"tenant_queue_share", tenant_queue_share}})
    if (!(value >= 0 && value <= 1e9)) return wrong(name, cat("is ", value, "; it must be from 0 to 1000000000"));
  if (patience <= Duration::zero()) return wrong("patience", "must be longer than 0");
  if (!(tenant_cache_share > 0 && tenant_cache_share <= 1))
    return wrong("tenant_cache_share", cat("is ", tenant_cache_share, "; it must be above 0 and at most 1"));
  for (const auto& [name, weight] : tenant_weights)
    if (!(weight > 0 && weight <= kMostWeight))
      return wrong("tenant_weights", cat("gives \"", name, "\" ", weight, "; a weight is above 0 and at most 1000000"));
  if (host_pages < 0) return wrong("host_pages", cat("is ", host_pages, "; it must not be negative"));
  if (host_pages > 0 && groups.size() > 1) return wrong("host_pages", "needs a model with one layer group");
  if (host_pages > 0 && groups[0].window > 0) return wrong("host_pages", "needs full attention");
  for (const auto& [name, asked] : {std::pair("host_pages", host_pages > 0), {"max_draft", max_draft > 0}})
    if (recurrent && asked) return wrong(name, "is not supported for models with recurrent states");
  if (kept_states < 0 || kept_states > int64_t(1) << 20)
    return wrong("kept_states", cat("is ", kept_states, "; it must be from 0 to ", int64_t(1) << 20));
  if (recurrent && prefix_cache && kept_states == 0)
    return wrong("kept_states", "is 0; with prefix_cache a recurrent model has at least 1");
  if (index_mode == kvcache::IndexMode::offset && (prefix_cache || host_pages > 0))
    return wrong("index_mode", "offset keeps one run a request: it works without prefix_cache and host_pages");
  if (index_mode == kvcache::IndexMode::offset && groups[0].sinks > 0)
    return wrong("index_mode", "offset keeps one run a request, of which nothing is given back: sinks need pages");
  return {};
}

}  // namespace kvasir::scheduler
