// Mixtures of experts on the host. The rows of a step are brought together by expert: the weights of a chosen expert
// are read once, by the products that all matrices have, and those of the others not at all. A row's result is what
// it would be alone, since products keep rows apart and its experts are added in the order of their scores.
#include <cmath>
#include <cstring>

#include "core/check.h"
#include "model/cpu/elementwise.h"
#include "model/cpu/ops.h"

namespace kvasir::model::cpu {
namespace {
constexpr int64_t kManyRows = 16;  // of one expert: weights are unpacked for them
constexpr int64_t kTall = 16;      // kernels may write so many rows of integers together
constexpr int64_t kLeastGroups = 8;
constexpr int64_t kRowBytes = 5 << 18;  // of a piece, as in ops.cc
constexpr int64_t kLately = 1 << 20;    // tokens of a layer that count as often as all before them
}  // namespace

// A slot is one of the experts of a row; those of an expert lie together, by row.
struct CpuOps::ExpertRows {
  struct Group {
    int32_t expert;
    int64_t first, count;  // slots
    int64_t tall;          // where its rows of integers begin
  };
  struct Piece {
    size_t input;
    int64_t first, count, group, groups;
  };
  // Of a layer's experts; halved now and then, so that it is of late.
  struct Usage {
    std::vector<int64_t> tokens;
    int64_t all = 0, most = 0;
  };
  std::vector<Usage> usage;  // by layer
  int64_t tokens = 0, reads = 0;
  std::vector<int32_t> chosen, slots;  // [rows, used]
  std::vector<float> weights;          // likewise
  std::vector<int32_t> rows;           // of each slot
  std::vector<int64_t> ends;           // by expert
  std::vector<Group> groups;
  std::vector<std::pair<size_t, int64_t>> pairs;  // of a group, from its row on
  std::vector<Piece> pieces;
  std::vector<float> in;       // [slots, hidden], where kernels want it so
  std::vector<float> gated;    // [slots, ffn]
  std::vector<float> results;  // [slots, hidden]
  QuantRoom quants[kMostRuns];
};

Result<int32_t> CpuOps::add_experts(Experts experts) {
  if (!expert_rows_) expert_rows_ = std::make_shared<ExpertRows>();
  LayerExperts layer{std::move(experts), {}};
  while (!layer.has(int32_t(layer.own))) ++layer.own;
  if (options_.link) KVASIR_TRY(make_partials(layer.of.mlps[layer.own].down.rows));
  KVASIR_CHECK(layer.of.mlps[layer.own].down.cols % kGroup == 0, "experts of no whole groups");
  if (experts_.empty() || experts_[0].of.mlps.size() != layer.of.mlps.size()) {
    KVASIR_ASSIGN(layer.logits, make_buffer(layer.of.routing.experts, false, Shard::whole));
  } else {
    layer.logits = experts_[0].logits;
  }
  experts_.push_back(std::move(layer));
  return int32_t(experts_.size() - 1);
}

Status CpuOps::choose_experts(const LayerExperts& layer, Buffer in) {
  ExpertRows& x = *expert_rows_;
  const Routing& r = layer.of.routing;
  KVASIR_TRY(linear(in, layer.of.router, layer.logits));
  const int64_t rows = this->rows(in), slots = rows * r.used;
  x.chosen.resize(size_t(slots)), x.weights.resize(size_t(slots));
  x.slots.resize(size_t(slots)), x.rows.resize(size_t(slots));
  each_row(rows, r.experts * 16, [&](int64_t t) {
    int32_t* chosen = x.chosen.data() + t * r.used;
    float* weights = x.weights.data() + t * r.used;
    r.choose(data(layer.logits) + t * r.experts, vector(layer.of.correction), chosen, weights);
    if (const float* scales = vector(layer.of.scales))
      for (int32_t k = 0; k < r.used; ++k) weights[k] *= scales[chosen[k]];
  });
  x.ends.assign(size_t(r.experts), 0);
  for (int32_t e : x.chosen) ++x.ends[size_t(e)];
  x.groups.clear(), x.pairs.clear();
  int64_t first = 0, tall = 0;
  for (int32_t e = 0; e < r.experts; ++e) {
    const int64_t count = x.ends[size_t(e)];
    x.ends[size_t(e)] = first;  // and then where its next slot is
    if (count == 0) continue;
    if (!layer.has(e)) {  // another rank's: they take their slots, which nobody reads
      first += count;
      continue;
    }
    for (int64_t t = 0; t < count; t += 2) x.pairs.emplace_back(x.groups.size(), t);
    x.groups.push_back({e, first, count, tall});
    first += count, tall += (count + kTall - 1) / kTall * kTall;
  }
  for (int64_t i = 0; i < slots; ++i) {
    const int64_t slot = x.ends[size_t(x.chosen[size_t(i)])]++;
    x.slots[size_t(i)] = int32_t(slot), x.rows[size_t(slot)] = int32_t(i / r.used);
  }
  return {};
}

void CpuOps::count_experts(size_t layer) {
  ExpertRows& x = *expert_rows_;
  if (x.usage.size() < experts_.size()) x.usage.resize(experts_.size());
  ExpertRows::Usage& u = x.usage[layer];
  u.tokens.resize(experts_[layer].of.mlps.size());
  for (size_t e = 0; e < u.tokens.size(); ++e) {  // of all ranks
    const int64_t count = x.ends[e] - (e > 0 ? x.ends[e - 1] : 0);
    if (count == 0) continue;
    u.most = std::max(u.most, u.tokens[e] += count);
    u.all += count, x.tokens += count, ++x.reads;
  }
  if (u.all < kLately) return;
  u.all = u.most = 0;
  for (int64_t& n : u.tokens) n /= 2, u.all += n, u.most = std::max(u.most, n);
}

ExpertLoad CpuOps::expert_load() const {
  if (!expert_rows_) return {};
  ExpertLoad out{.tokens = expert_rows_->tokens, .reads = expert_rows_->reads};
  int64_t layers = 0;
  for (const ExpertRows::Usage& u : expert_rows_->usage) {
    if (u.all == 0) continue;
    const double over = double(u.most) * double(u.tokens.size()) / double(u.all);
    out.worst = std::max(out.worst, over), out.usual += over, ++layers;
  }
  if (layers > 0) out.usual /= double(layers);
  return out;
}

// The left sides of the groups' products by their experts' `which`. row_at(slot): a row, which begins the next one
// of its group where `dense`; then it is as long as the matrices are padded to.
template <class RowAt>
std::vector<CpuOps::Input> CpuOps::expert_inputs(const LayerExperts& layer, Matrix Mlp::*which, bool dense,
                                                 const RowAt& row_at) {
  ExpertRows& x = *expert_rows_;
  std::vector<Input> out;
  const int64_t cols = matrices_[size_t((layer.of.mlps[layer.own].*which).id)].padded_cols();
  const int64_t lines = (cols + 63) / 64 * 2;  // of a row in QuantRoom
  const ExpertRows::Group& last = x.groups.back();
  for (const ExpertRows::Group& g : x.groups) {
    const Matrix weight = layer.of.mlps[size_t(g.expert)].*which;
    Input in{matrices_[size_t(weight.id)], g.count, nullptr, {}, vector(biases_[size_t(weight.id)])};
    for (size_t i = 0; i < in.m.runs.size(); ++i) {
      if (!of_integers(in.m.runs[i])) continue;
      const QuantRows all = x.quants[i].rows(last.tall + last.count, cols);
      in.quants[i] = {all.q + g.tall * lines * 64,
                      all.d + g.tall,
                      all.sums + 2 * g.tall * lines,
                      all.offsets + 8 * g.tall * lines,
                      all.planes + 8 * g.tall * lines,
                      cols,
                      g.count};
    }
    out.push_back(in);
  }
  const int64_t own = out[0].m.cols;
  if (!dense && (own != cols || std::any_of(out.begin(), out.end(), [](const Input& i) { return i.floats(); })))
    x.in.resize(std::max(x.in.size(), x.rows.size() * size_t(cols)));
  each_row(int64_t(x.pairs.size()), 2 * cols, [&](int64_t i) {
    const auto [group, begin] = x.pairs[size_t(i)];
    const ExpertRows::Group& g = x.groups[group];
    const Input& in = out[group];
    for (int64_t t = begin; t < std::min(g.count, begin + 2); ++t) {
      const float* row = row_at(g.first + t);
      if (!dense && (own != cols || in.floats())) {
        float* to = x.in.data() + (g.first + t) * cols;
        std::memcpy(to, row, size_t(own) * sizeof(float));
        std::fill(to + own, to + cols, 0.0f);
        row = to;
      }
      in.quantize(kernels_, row, t);
    }
  });
  for (size_t i = 0; i < out.size(); ++i)
    if (out[i].floats()) out[i].x = dense ? row_at(x.groups[i].first) : x.in.data() + x.groups[i].first * cols;
  return out;
}

// f(input, first row, rows, first group, groups, worker) until every input's rows have met `groups`: of few rows
// several pieces for each worker, of many pieces whose outputs stay in its cache.
template <class F>
void CpuOps::each_expert_piece(const std::vector<Input>& inputs, int64_t groups, int64_t most_groups, const F& f) {
  std::vector<ExpertRows::Piece>& pieces = expert_rows_->pieces;
  pieces.clear();
  const int64_t wanted = (8 * pool_.threads() + int64_t(inputs.size()) - 1) / int64_t(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Input& in = inputs[i];
    const int64_t most = std::max<int64_t>(32, kRowBytes / (in.m.padded_cols() * (in.floats() ? 4 : 3)) / 32 * 32);
    const int64_t parts = in.rows > kManyRows ? (groups + most_groups - 1) / most_groups
                                              : std::clamp<int64_t>(groups / kLeastGroups, 1, wanted);
    for (int64_t first = 0; first < in.rows; first += most)
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t group = groups * part / parts, end = groups * (part + 1) / parts;
        pieces.push_back({i, first, std::min(most, in.rows - first), group, end - group});
      }
  }
  pool_.for_each_near(int64_t(pieces.size()), [&](int64_t i, int worker) {
    const ExpertRows::Piece& p = pieces[size_t(i)];
    f(p.input, p.first, p.count, p.group, p.groups, worker);
  });
}

void CpuOps::expert_glu(const LayerExperts& layer, Buffer in) {
  ExpertRows& x = *expert_rows_;
  const auto inputs =
      expert_inputs(layer, &Mlp::up, false, [&](int64_t slot) { return data(in) + x.rows[size_t(slot)] * in.cols; });
  const Weight& down = matrices_[size_t(layer.of.mlps[layer.own].down.id)];
  const int64_t ffn = down.cols, stride = down.padded_cols(), half = ffn / kGroup;
  x.gated.resize(std::max(x.gated.size(), x.rows.size() * size_t(stride)));
  gates_.resize(size_t(pool_.threads()));
  each_expert_piece(
      inputs, half, 4, [&](size_t i, int64_t first, int64_t count, int64_t group, int64_t groups, int worker) {
        const int64_t cols = groups * kGroup;
        std::vector<float>& room = gates_[size_t(worker)];
        room.resize(std::max(room.size(), size_t(count * 2 * cols)));
        inputs[i].product(kernels_, first, count, group, groups, false, room.data(), 2 * cols);
        inputs[i].product(kernels_, first, count, half + group, groups, false, room.data() + cols, 2 * cols);
        for (int64_t t = 0; t < count; ++t) {
          const float* gate = room.data() + t * 2 * cols;
          float* to = x.gated.data() + (x.groups[i].first + first + t) * stride;
          if (layer.of.limit > 0)
            clamped_glu(gate, gate + cols, cols, layer.of.limit, layer.of.slope, to + group * kGroup);
          else
            glu_row(layer.of.activation, gate, gate + cols, cols, to + group * kGroup);
          if (group + groups == half) std::fill(to + ffn, to + stride, 0.0f);
        }
      });
}

Status CpuOps::moe(Buffer in, int32_t experts, Buffer out, Buffer routed) {
  ExpertRows& x = *expert_rows_;
  const LayerExperts& layer = experts_[size_t(experts)];
  KVASIR_CHECK(in.id != out.id, "experts cannot add to what they read");
  if (rows(in) == 0) return {};
  KVASIR_TRY(choose_experts(layer, routed.id < 0 ? in : routed));
  count_experts(size_t(experts));
  if (!x.groups.empty()) run_experts(layer, in, out.cols);
  const int64_t used = layer.of.routing.used;
  const bool sum = options_.link != nullptr;
  const Buffer to_rows = sum ? partial() : out;
  each_row(rows(in), used * out.cols, [&](int64_t t) {
    float* to = data(to_rows) + t * out.cols;
    if (sum) std::fill_n(to, out.cols, 0.0f);
    for (int64_t k = t * used; k < (t + 1) * used; ++k) {
      if (!layer.has(x.chosen[size_t(k)])) continue;
      const float weight = x.weights[size_t(k)], *from = x.results.data() + x.slots[size_t(k)] * out.cols;
      for (int64_t i = 0; i < out.cols; ++i) to[i] += weight * from[i];
    }
  });
  return sum ? sum_partials(true, out) : Status();
}

// The results of each slot of the experts that this rank has.
void CpuOps::run_experts(const LayerExperts& layer, Buffer in, int64_t cols) {
  ExpertRows& x = *expert_rows_;
  expert_glu(layer, in);
  const int64_t stride = matrices_[size_t(layer.of.mlps[layer.own].down.id)].padded_cols();
  const auto inputs =
      expert_inputs(layer, &Mlp::down, true, [&](int64_t slot) { return x.gated.data() + slot * stride; });
  x.results.resize(std::max(x.results.size(), x.rows.size() * size_t(cols)));
  each_expert_piece(inputs, inputs[0].m.groups, 16,
                    [&](size_t i, int64_t first, int64_t count, int64_t group, int64_t groups, int) {
                      float* to = x.results.data() + (x.groups[i].first + first) * cols + group * kGroup;
                      inputs[i].product(kernels_, first, count, group, groups, false, to, cols);
                    });
}

Status CpuOps::sigmoid_gate(Buffer in, Vector gate, Buffer in_out) {
  const float* w = vector(gate);
  each_row(rows(in), in.cols + in_out.cols, [&](int64_t t) {
    double sum = 0;
    for (int64_t i = 0; i < in.cols; ++i) sum += double(data(in)[t * in.cols + i]) * double(w[i]);
    const auto scale = float(1 / (1 + std::exp(-sum)));
    float* x = data(in_out) + t * in_out.cols;
    for (int64_t i = 0; i < in_out.cols; ++i) x[i] *= scale;
  });
  return {};
}

}  // namespace kvasir::model::cpu
