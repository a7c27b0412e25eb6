#include "model/arch/adapter_places.h"

#include <numeric>
#include <unordered_map>

#include "core/cat.h"
#include "model/arch/layer_loader.h"
#include "model/formats/slices.h"

namespace kvasir::model {
namespace {

// What adapters change. kv_b_proj of latent attention is none: it is served as each head's parts, which queries and
// results are multiplied by.
constexpr const char *kUsual = "q, k, v, o, gate, up, down", *kLatent = "q or q_a and q_b, kv_a, o, gate, up, down";

class Places {
 public:
  Places(const AdapterFile& file, const ModelConfig& config, const Network& network)
      : file_(file),
        config_(config),
        architecture_(*find_architecture(config.architecture)),
        projections_(network.projections()) {}

  Result<std::vector<LowRank>> all() {
    if (projections_.empty())
      return unimplemented(cat("adapters are not served for models of the architecture ", config_.architecture));
    const std::string_view general = architecture_.gguf.empty() ? architecture_.name : architecture_.gguf;
    if (file_.gguf && file_.architecture != general)
      return invalid_argument(cat(file_.path, ": general.architecture is ", file_.architecture.substr(0, 64),
                                  "; the model's is ", general));
    index();
    std::vector<LowRank> out;
    for (const AdapterModule& m : file_.modules) {
      KVASIR_ASSIGN(LowRank placed, place(m));
      out.push_back(std::move(placed));
    }
    return out;
  }

 private:
  void index() {
    const TensorNames names(architecture_.names);
    for (const Projection& p : projections_) {
      const std::string ours = p.name + ".weight";
      if (file_.gguf) {
        for (const std::string& name : names.gguf(ours)) add(name, p);
        continue;
      }
      for (const std::string& name : names.hugging_face(ours)) {
        const size_t dot = name.find('.');
        for (const std::string& whole : {name, "language_model." + name,
                                         "model.language_model." + name.substr(dot == std::string::npos ? 0 : dot + 1)})
          add(whole, p);
      }
    }
  }
  void add(std::string name, const Projection& p) {
    if (!name.ends_with(".weight")) return;
    name.resize(name.size() - 7);
    by_name_.emplace(std::move(name), &p);
  }

  Result<LowRank> place(const AdapterModule& m) const {
    const auto it = by_name_.find(m.name);
    if (it == by_name_.end())
      return invalid_argument(cat(file_.path, ": module ", m.name.substr(0, 128),
                                  " is none that adapters of this model are served for; the ",
                                  "projections of its layers are (", config_.latent.on() ? kLatent : kUsual, ")",
                                  config_.experts.routing.experts > 0 ? ", those of experts and routers are not" : ""));
    const Projection& p = *it->second;
    int64_t rows = p.outputs.empty() ? p.rows : 0;  // of all ranks
    for (const Share& piece : p.outputs) rows += piece.all;
    const int64_t cols = p.inputs.whole(p.weight.cols);
    if (m.a.cols != cols || m.b.rows != rows)
      return invalid_argument(cat(file_.path, ": module ", m.name, " is ", m.b.rows, " x ", m.a.cols,
                                  " (outputs x inputs); the model's is ", rows, " x ", cols));
    if (p.inputs.split() && !m.magnitude.empty())
      return unimplemented(cat(file_.path, ": module ", m.name, " has magnitudes (DoRA), which rows that several ",
                               "ranks have a part of don't take: --ranks 1"));
    LowRank out{.weight = p.weight, .first = p.first, .a = m.a, .b = m.b, .scale = m.scale, .magnitude = m.magnitude};
    if (p.inputs.split()) {
      KVASIR_ASSIGN(out.a, columns_of(m.a, p.inputs));
    }
    KVASIR_ASSIGN(std::vector<int32_t> order, order_of(p, m, rows));
    own_rows(p.outputs, rows, order);
    if (order.empty()) return out;
    for (size_t i = 0; i < out.magnitude.size(); ++i) out.magnitude[i] = m.magnitude[size_t(order[i])];
    if (!out.magnitude.empty()) out.magnitude.resize(size_t(p.rows));
    out.b = rows_of(reordered(m.b, [&](int64_t i) { return order[size_t(i)]; }), 0, p.rows);
    return out;
  }

  // Of `order` (empty: as they lie) the rows that a rank has, before the others.
  static void own_rows(const std::vector<Share>& pieces, int64_t rows, std::vector<int32_t>& order) {
    if (pieces.empty()) return;
    if (order.empty()) order.resize(size_t(rows)), std::iota(order.begin(), order.end(), 0);
    std::vector<int32_t> out;
    out.reserve(order.size());
    int64_t at = 0;
    for (const Share& piece : pieces) {
      const auto first = order.begin() + at + piece.first;
      out.insert(out.end(), first, first + piece.count);
      at += piece.all;
    }
    out.resize(order.size());
    order = std::move(out);
  }

  // Which row of the file's each of the whole weight's is; empty: the same.
  Result<std::vector<int32_t>> order_of(const Projection& p, const AdapterModule& m, int64_t rows) const {
    std::vector<int32_t> out;
    const int64_t d = config_.head_dim, heads = rows / d;
    if (p.order == Projection::Order::groups) {
      if (!file_.gguf && config_.from_gguf)
        return unimplemented(cat(file_.path, ": module ", m.name,
                                 " is one of queries, keys and values together; for a ",
                                 "model from a GGUF file convert the adapter to GGUF, or serve the model's folder"));
      if (file_.gguf || !config_.qkv_by_group) return out;
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t i = 0; i < d; ++i) out.push_back(int32_t(grouped_head(config_, h) * d + i));
      return out;
    }
    const bool turns = architecture_.gguf_turns_neighbours;
    const bool interleaved = config_.from_gguf || config_.from_mistral;
    if (p.order != Projection::Order::heads || !turns || file_.gguf == interleaved) return out;
    // In GGUF rows i and i + d / 2 of a head are neighbours.
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < d; ++i)
        out.push_back(int32_t(h * d + (interleaved ? i % 2 * (d / 2) + i / 2 : i % (d / 2) * 2 + i / (d / 2))));
    return out;
  }

  const AdapterFile& file_;
  const ModelConfig& config_;
  const Architecture& architecture_;
  const std::vector<Projection> projections_;
  std::unordered_map<std::string, const Projection*> by_name_;
};

}  // namespace

Result<std::vector<LowRank>> place_adapter(const AdapterFile& file, const ModelConfig& config, const Network& network) {
  return Places(file, config, network).all();
}

}  // namespace kvasir::model
