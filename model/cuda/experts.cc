#include "model/cuda/experts.h"

#include <algorithm>

#include "core/cat.h"
#include "core/check.h"

namespace kvasir::model::cuda {
namespace {

using attention::cuda::check;

// Of up to so many rows each has its experts nearly for itself (gpu_experts_bench).
constexpr int64_t kFewRows = 8, kFewRowsMxfp4 = 16;

Result<Gate> gate_of(const Experts& e) {
  if (e.limit > 0) return Gate{.slope = e.slope, .limit = e.limit, .shift = 1};
  if (e.activation == Activation::silu) return Gate{};
  constexpr float kTwice = 2 * 0.7978845608028654f;
  if (e.activation == Activation::gelu_tanh) return Gate{.slope = kTwice, .cubic = kTwice * 0.044715f};
  return unimplemented("experts whose gates are neither SiLU nor GELU by tanh are served by the CPU (--device cpu)");
}

bool runs_many() {
  int device = 0, major = 0, minor = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == 9 &&
         minor == 0;
}

}  // namespace

Status ExpertLayers::fill(Matrices& to, std::span<const Part> parts, Upload& upload) {
  ExpertMatrix& m = to.matrix;
  const auto mxfp4 =
      std::count_if(parts.begin(), parts.end(), [](const Part& p) { return p.weight->packing == Packing::mxfp4; });
  m.mxfp4 = mxfp4 > 0;
  if (m.mxfp4 && mxfp4 != std::ssize(parts))
    return unimplemented("a layer some of whose experts are MXFP4 is served by the CPU alone (--device cpu)");
  KVASIR_TRY(to.tiles.allocate(size_t(m.bytes()) * parts.size()));
  m.tiles = to.tiles.get();
  bytes_ += m.bytes() * int64_t(parts.size());
  DeviceMemory room, too_large;
  KVASIR_TRY(too_large.allocate(sizeof(int32_t)));
  KVASIR_TRY(check(cudaMemsetAsync(too_large.get(), 0, sizeof(int32_t), stream_), "experts"));
  for (size_t e = 0; e < parts.size(); ++e) {
    const void* from = parts[e].weight->data.get();
    if (!m.mxfp4) {
      KVASIR_ASSIGN(from, as_half(*parts[e].weight, &room, stream_));
    }
    launch_expert_tiles(from, m, int64_t(e), too_large.as<int32_t>(), stream_);
    KVASIR_TRY(check(cudaGetLastError(), "experts"));
  }
  if (parts[0].bias) {
    const auto each = size_t(m.rows) * sizeof(float);
    KVASIR_TRY(to.bias.allocate(each * parts.size()));
    for (size_t e = 0; e < parts.size(); ++e)
      KVASIR_TRY(check(cudaMemcpyAsync(to.bias.bytes() + e * each, parts[e].bias, each, cudaMemcpyDefault, stream_),
                       "experts' biases"));
    m.bias = to.bias.as<float>();
  }
  if (m.mxfp4) {
    int32_t large = 0;
    KVASIR_TRY(check(cudaMemcpyAsync(&large, too_large.get(), sizeof large, cudaMemcpyDefault, stream_), "experts"));
    KVASIR_TRY(check(cudaStreamSynchronize(stream_), "experts"));
    if (large) return unimplemented("experts in MXFP4 with scales above 2 are served by the CPU alone (--device cpu)");
  }
  for (const Part& p : parts) {
    if (p.weight->packing == Packing::fp8)  // which counts its scales, too
      KVASIR_TRY(p.weight->data.allocate(0));
    else
      upload.give_back(std::move(p.weight->data), p.weight->bytes);
    KVASIR_TRY(p.weight->scales.allocate(0));
  }
  return {};
}

Result<int32_t> ExpertLayers::add(Experts experts, int32_t first, std::span<const Part> up, std::span<const Part> down,
                                  Upload& upload) {
  auto layer = std::make_unique<Layer>();
  layer->of = std::move(experts);
  layer->first = first, layer->own = int32_t(up.size());
  const Weight &u = *up[0].weight, &d = *down[0].weight;
  if (u.cols % 8 != 0 || d.cols % 8 != 0 || d.rows % 4 != 0)
    return unimplemented(cat("experts of ", u.rows, " x ", u.cols, " and ", d.rows, " x ", d.cols,
                             " are not served on a GPU, which needs multiples of 8; on the CPU they are "
                             "(--device cpu)"));
  layer->up.matrix = {.rows = u.rows, .cols = u.cols, .gated = true};
  KVASIR_ASSIGN(layer->up.matrix.gate, gate_of(layer->of));
  layer->down.matrix = {.rows = d.rows, .cols = d.cols};
  KVASIR_TRY(fill(layer->up, up, upload));
  KVASIR_TRY(fill(layer->down, down, upload));
  KVASIR_TRY(make_room(*layer));
  layers_.push_back(std::move(layer));
  return int32_t(layers_.size() - 1);
}

Status ExpertLayers::make_room(const Layer& layer) {
  const Routing& r = layer.of.routing;
  const int64_t slots = slots_of(max_rows_, r.used), items = r.experts + slots / kItemRows + 1;
  if (slots > slots_) {
    for (DeviceMemory* m : {&chosen_, &weights_, &slot_of_, &slot_rows_}) KVASIR_TRY(m->allocate(size_t(slots) * 4));
  }
  if (r.experts > most_experts_) {
    most_experts_ = r.experts;
    KVASIR_TRY(experts_.allocate(size_t(4 * most_experts_ + 1) * sizeof(int32_t)));
    KVASIR_TRY(check(cudaMemset(experts_.get(), 0, size_t(most_experts_) * sizeof(int32_t)), "experts"));
  }
  if (items > most_items_) KVASIR_TRY(items_.allocate(size_t(items) * sizeof(ExpertItem)));
  most_items_ = std::max(most_items_, items);
  const int64_t gated = layer.up.matrix.results(), sums = layer.down.matrix.results();
  if (slots > slots_ || gated > gated_cols_)
    KVASIR_TRY(gated_.allocate(size_t(std::max(slots, slots_) * std::max(gated, gated_cols_)) * 2));
  if (slots > slots_ || sums > sum_cols_)
    KVASIR_TRY(sums_.allocate(size_t(std::max(slots, slots_) * std::max(sums, sum_cols_)) * 4));
  slots_ = std::max(slots, slots_), gated_cols_ = std::max(gated, gated_cols_), sum_cols_ = std::max(sums, sum_cols_);
  return {};
}

int ExpertLayers::item_rows(const Layer& layer, int64_t rows) const {
  const Routing& r = layer.of.routing;
  static const bool many = runs_many();
  if (!many || (rows <= (layer.up.matrix.mxfp4 ? kFewRowsMxfp4 : kFewRows) && !invariant_)) return kItemRows;
  // Rows of an expert on average, with room for those that have more: most experts are one item.
  const int64_t average = rows * r.used / r.experts;
  return invariant_ || average <= 48 ? 64 : 128;
}

Status ExpertLayers::run(int32_t id, const void* in, const float* logits, const float* correction, const float* scales,
                         int64_t rows, bool apart, void* out) {
  const Layer& layer = *layers_[size_t(id)];
  const Routing& r = layer.of.routing;
  const int64_t slots = rows * r.used;
  KVASIR_CHECK(slots <= slots_, rows, " rows, room for ", max_rows_);
  auto* by_expert = experts_.as<int32_t>();
  const Routed routed{.scales = scales,
                      .chosen = chosen_.as<int32_t>(),
                      .weights = weights_.as<float>(),
                      .slot_of = slot_of_.as<int32_t>(),
                      .slot_rows = slot_rows_.as<int32_t>(),
                      .items = items_.as<ExpertItem>(),
                      .count = by_expert + 4 * most_experts_,
                      .first = layer.first,
                      .own = layer.own,
                      .counts = by_expert,
                      .next = by_expert + most_experts_,
                      .first_slots = by_expert + 2 * most_experts_,
                      .first_items = by_expert + 3 * most_experts_};
  const int each = item_rows(layer, rows);
  const int64_t items = std::min(slots, r.experts + slots / each);
  launch_route(r, logits, correction, routed, rows, each, stream_);
  auto product = [&](const Matrices& m, const void* from, bool by_slot, void* to) {
    return each == kItemRows ? launch_experts_few(m.matrix, routed, from, by_slot, to, items, stream_)
                             : launch_experts_many(m.matrix, routed, from, by_slot, to, items, each, stream_);
  };
  KVASIR_TRY(check(product(layer.up, in, false, gated_.get()), "experts"));
  KVASIR_TRY(check(product(layer.down, gated_.get(), true, sums_.get()), "experts"));
  launch_combine(sums_.as<float>(), routed, r.used, apart, out, rows, layer.down.matrix.results(), stream_);
  return check(cudaGetLastError(), "experts");
}

}  // namespace kvasir::model::cuda
