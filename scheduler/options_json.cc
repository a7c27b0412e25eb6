#include "scheduler/options_json.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/cat.h"

namespace kvasir::scheduler {
namespace {

using nlohmann::json;

constexpr const char* kIndexModes[] = {"offset", "page_table", "token_table"};  // in the order of IndexMode

// One list of names for both directions: `v(name, field)` for every plain field.
template <class O, class V>
void each_field(O& o, const V& v) {
  v("page_size", o.page_size);
  v("host_pages", o.host_pages);
  v("max_context", o.max_context);
  v("max_tokens_per_step", o.max_tokens_per_step);
  v("max_step_ms", o.max_step_ms);
  v("max_running", o.max_running);
  v("depth", o.depth);
  v("lookahead_tokens", o.lookahead_tokens);
  v("max_draft", o.max_draft);
  v("prefix_cache", o.prefix_cache);
  v("recurrent", o.recurrent);
  v("kept_states", o.kept_states);
  v("policy", o.policy);
  v("max_waiting", o.max_waiting);
  v("max_waiting_tokens", o.max_waiting_tokens);
  v("tenant_max_waiting", o.tenant_max_waiting);
  v("tenant_max_waiting_tokens", o.tenant_max_waiting_tokens);
  v("max_wait_s", o.max_wait_s);
  v("max_wait_answers", o.max_wait_answers);
  v("tenant_queue_share", o.tenant_queue_share);
  v("tenant_cache_share", o.tenant_cache_share);
}

template <class C, class V>
void each_cost(C& c, const V& v) {
  v("fixed_us", c.fixed_us);
  v("token_us", c.token_us);
  v("context_us", c.context_us);
  v("decode_token_us", c.decode_token_us);
  v("decode_context_us", c.decode_context_us);
  v("page_move_us", c.page_move_us);
}

class Reader {
 public:
  explicit Reader(const std::string& source) : source_(source) {}

  Status wrong(const std::string& name, const std::string& what) const {
    return invalid_argument(cat(source_, ": ", name, ' ', what)).with_field(name);
  }
  Status read(const std::string& name, const json& j, double* out) const {
    if (!j.is_number() || !std::isfinite(j.get<double>())) return wrong(name, cat("is ", j.dump(), "; it is a number"));
    *out = j.get<double>();
    return {};
  }
  Status read(const std::string& name, const json& j, bool* out) const {
    if (!j.is_boolean()) return wrong(name, cat("is ", j.dump(), "; it is true or false"));
    *out = j.get<bool>();
    return {};
  }
  Status read(const std::string& name, const json& j, std::string* out) const {
    if (!j.is_string()) return wrong(name, cat("is ", j.dump(), "; it is a string"));
    *out = j.get<std::string>();
    return {};
  }
  template <std::integral T>
  Status read(const std::string& name, const json& j, T* out) const {
    const double x = j.is_number() ? j.get<double>() : std::numeric_limits<double>::quiet_NaN();
    const double most = std::min<double>(1e15, static_cast<double>(std::numeric_limits<T>::max()));
    if (!(std::abs(x) <= most) || x != std::floor(x))
      return wrong(name, cat("is ", j.dump(), "; it is a whole number of at most ", static_cast<int64_t>(most)));
    *out = static_cast<T>(x);
    return {};
  }

  Status cost(const json& j, StepCost* out) const {
    if (!j.is_object()) return wrong("cost", "must be an object");
    for (const auto& item : j.items()) {
      const std::string& name = item.key();
      bool known = false;
      Status status;
      each_cost(*out, [&](const char* field, double& x) {
        if (name != field) return;
        known = true;
        status = read(name, item.value(), &x);
        if (status.ok() && (x < 0 || x > 1e9)) status = wrong(name, cat("is ", x, "; a cost is from 0 to 1000000000"));
      });
      if (!known) return wrong(name, "is no part of a cost");
      KVASIR_TRY(status);
    }
    return {};
  }

  // Bounded: a pool takes memory for each of its pages.
  Status pages(const std::string& name, const json& j, int64_t* out) const {
    constexpr int64_t kMost = int64_t(1) << 26;
    KVASIR_TRY(read(name, j, out));
    if (*out < 0 || *out > kMost) return wrong(name, cat("is ", *out, "; it must be from 0 to ", kMost));
    return {};
  }
  Status groups(const json& j, std::vector<PageGroup>* out) const {
    if (!j.is_array() || j.empty() || j.size() > 4) return wrong("groups", "must be a list of 1 to 4 pools");
    out->clear();
    for (const json& g : j) {
      if (!g.is_object()) return wrong("groups", "must list objects with pages and window");
      PageGroup& group = out->emplace_back();
      for (const auto& item : g.items()) {
        if (item.key() == "pages") {
          KVASIR_TRY(pages("pages", item.value(), &group.pages));
        } else if (item.key() == "window") {
          KVASIR_TRY(read("window", item.value(), &group.window));
        } else if (item.key() == "sinks") {
          KVASIR_TRY(read("sinks", item.value(), &group.sinks));
        } else {
          return wrong(item.key(), "is no part of a pool; pages, window and sinks are");
        }
      }
    }
    return {};
  }

 private:
  const std::string& source_;
};

}  // namespace

std::string json_string(const std::string& text) {
  return json(text).dump(-1, ' ', true, json::error_handler_t::replace);
}

std::string options_to_json(const Settings& o) {
  json j;
  each_field(o, [&](const char* name, const auto& x) { j[name] = x; });
  for (const PageGroup& g : o.groups)
    j["groups"].push_back({{"pages", g.pages}, {"window", g.window}, {"sinks", g.sinks}});
  j["index_mode"] = kIndexModes[static_cast<int>(o.index_mode)];
  j["patience_s"] = std::chrono::duration<double>(o.patience).count();
  j["tenant_weights"] = o.tenant_weights;
  each_cost(o.cost, [&](const char* name, double x) { j["cost"][name] = x; });
  return j.dump(-1, ' ', true, json::error_handler_t::replace);
}

Status apply_json(const std::string& text, Settings* o, const std::string& source) {
  json j = json::parse(text, nullptr, false, true);
  if (!j.is_object()) return invalid_argument(cat(source, " is not a JSON object"));
  const Reader reader(source);
  for (const auto& item : j.items()) {
    const std::string& name = item.key();
    const json& value = item.value();
    bool known = false;
    Status status;
    each_field(*o, [&](const char* field, auto& x) {
      if (name == field) known = true, status = reader.read(name, value, &x);
    });
    KVASIR_TRY(status);
    if (name == "host_pages") KVASIR_TRY(reader.pages(name, value, &o->host_pages));
    if (known || name == "about" || name == "source") continue;  // the latter are for the reader
    if (name == "cost") {
      KVASIR_TRY(reader.cost(value, &o->cost));
    } else if (name == "groups") {
      KVASIR_TRY(reader.groups(value, &o->groups));
    } else if (name == "pages") {  // of a model with one pool
      o->groups.resize(1);
      KVASIR_TRY(reader.pages(name, value, &o->groups[0].pages));
    } else if (name == "index_mode") {
      std::string mode;
      KVASIR_TRY(reader.read(name, value, &mode));
      const auto* at = std::find(std::begin(kIndexModes), std::end(kIndexModes), mode);
      if (at == std::end(kIndexModes))
        return reader.wrong(name, cat("is \"", mode, "\"; it must be offset, page_table or token_table"));
      o->index_mode = static_cast<kvcache::IndexMode>(at - std::begin(kIndexModes));
    } else if (name == "patience_s") {
      double s = 0;
      KVASIR_TRY(reader.read(name, value, &s));
      if (!(std::abs(s) < 1e9)) return reader.wrong(name, cat("is ", s, "; at most 1000000000 s"));
      o->patience = std::chrono::nanoseconds(std::llround(s * 1e9));
    } else if (name == "tenant_weights") {
      if (!value.is_object()) return reader.wrong(name, "must be an object of numbers");
      for (const auto& tenant : value.items())
        KVASIR_TRY(reader.read(tenant.key(), tenant.value(), &o->tenant_weights[tenant.key()]));
    } else {
      return reader.wrong(name, "is not known");
    }
  }
  return {};
}

}  // namespace kvasir::scheduler
