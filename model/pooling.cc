#include "model/pooling.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/cat.h"

namespace kvasir::model {
namespace {

using json = nlohmann::json;

std::string text_of(const json& object, const char* key) {
  auto it = object.find(key);
  return it != object.end() && it->is_string() ? it->get<std::string>() : "";
}

// A pooling module's config.json: a truth a mode, or the mode by name.
Status read_pooling(const json& config, const std::string& name, PoolingRule& rule) {
  struct Mode {
    const char *key, *word;
    int pooling;  // -1: not served
  };
  static constexpr Mode kModes[] = {{"pooling_mode_lasttoken", "lasttoken", int(Pooling::last)},
                                    {"pooling_mode_mean_tokens", "mean", int(Pooling::mean)},
                                    {"pooling_mode_cls_token", "cls", int(Pooling::cls)},
                                    {"pooling_mode_max_tokens", "max", -1},
                                    {"pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens", -1},
                                    {"pooling_mode_weightedmean_tokens", "weightedmean", -1}};
  const std::string word = text_of(config, "pooling_mode");
  std::vector<const Mode*> on;
  for (const Mode& m : kModes) {
    auto it = config.find(m.key);
    if (word == m.word || (it != config.end() && it->is_boolean() && it->get<bool>())) on.push_back(&m);
  }
  if (on.size() != 1) {
    rule.refusal = cat(name, " names ", on.size(), " ways of pooling; one of last, mean and cls is served: --pooling");
  } else if (on[0]->pooling < 0) {
    rule.refusal = cat(name, " pools by ", on[0]->key, "; last, mean and cls are served: --pooling");
  } else {
    rule.pooling = Pooling(on[0]->pooling);
  }
  auto prompt = config.find("include_prompt");
  if (rule.refusal.empty() && prompt != config.end() && prompt->is_boolean() && !prompt->get<bool>())
    rule.refusal = cat(name, " leaves an instruction's tokens out (include_prompt is false), which is not served");
  return {};
}

}  // namespace

const char* pooling_name(Pooling pooling) {
  switch (pooling) {
    case Pooling::last: return "last";
    case Pooling::mean: return "mean";
    case Pooling::cls: return "cls";
  }
  return "?";
}

Result<PoolingRule> pooling_from_modules(std::string_view modules, const std::string& name,
                                         const std::function<Result<std::string>(const std::string&)>& read) {
  const json list = json::parse(modules, nullptr, false);
  if (!list.is_array()) return invalid_argument(cat(name, " is no list of modules"));
  PoolingRule rule{Pooling::mean, false, {}};
  for (const json& module : list) {
    if (!module.is_object()) return invalid_argument(cat(name, " has an entry that is no module"));
    const std::string type = text_of(module, "type"), kind = type.substr(type.rfind('.') + 1);
    if (kind == "Transformer") continue;
    if (kind == "Normalize") {
      rule.normalize = true;
    } else if (kind == "Pooling") {
      const std::string folder = text_of(module, "path");
      const bool inside = !folder.empty() && folder.find("..") == std::string::npos && folder[0] != '/';
      if (!inside) return invalid_argument(cat(name, ": the path '", folder.substr(0, 80), "' is no folder beside it"));
      KVASIR_ASSIGN(std::string text, read(folder));
      const json config = json::parse(text, nullptr, false);
      if (!config.is_object()) return invalid_argument(cat(folder, "/config.json of ", name, " is missing or no JSON"));
      KVASIR_TRY(read_pooling(config, cat(folder, "/config.json"), rule));
    } else if (rule.refusal.empty()) {
      rule.refusal = cat(name, " has a module ", kind.substr(0, 80),
                         ", which this server does not compute; Transformer, Pooling and Normalize are");
    }
  }
  return rule;
}

PoolingRule pooling_from_gguf(int32_t type, PoolingRule usual) {
  switch (type) {
    case 0: return usual;  // none: each token's own, as decoders' files have it
    case 1: usual.pooling = Pooling::mean; return usual;
    case 2: usual.pooling = Pooling::cls; return usual;
    case 3: usual.pooling = Pooling::last; return usual;
    default:
      usual.refusal =
          cat("the file's pooling_type is ", type, "; 1 (mean), 2 (cls) and 3 (last) are served: --pooling");
      return usual;
  }
}

Status choose_pooling(const std::string& pooling, const std::string& normalize, PoolingRule& rule) {
  if (!pooling.empty() && pooling != "auto") {
    bool known = false;
    for (Pooling p : {Pooling::last, Pooling::mean, Pooling::cls})
      if (pooling == pooling_name(p)) rule.pooling = p, known = true;
    if (!known)
      return invalid_argument(cat("pooling is ", pooling, "; it must be auto, last, mean or cls"))
          .with_field("pooling");
    rule.refusal.clear();
  }
  if (normalize == "yes" || normalize == "no") rule.normalize = normalize == "yes";
  return {};
}

void add_pooled(std::span<const Batch::Pool> pools, int64_t first, int64_t count, const float* hidden, int64_t cols,
                float scale) {
  int64_t begin = 0;  // of the pool's rows
  for (const Batch::Pool& pool : pools) {
    for (int64_t row = std::max(first, begin); row < std::min(first + count, begin + pool.count); ++row) {
      const float* x = hidden + (row - first) * cols;
      for (int64_t i = 0; i < cols; ++i) pool.sum[i] += x[i] * scale;
    }
    begin += pool.count;
  }
}

bool finish_embedding(std::vector<float>& sum, int64_t rows, int64_t dimensions, bool normalize) {
  if (dimensions > 0 && dimensions < int64_t(sum.size())) sum.resize(size_t(dimensions));
  double squares = 0;
  for (float& x : sum) {
    if (rows > 1) x /= float(rows);
    squares += double(x) * x;
  }
  if (!std::isfinite(squares)) return false;
  if (normalize && squares > 0) {
    const double by = 1 / std::sqrt(squares);
    for (float& x : sum) x = float(x * by);
  }
  return true;
}

}  // namespace kvasir::model
