#include "model/cuda/adapter.h"

#include <algorithm>
#include <bit>

#include "core/cat.h"
#include "core/check.h"
#include "model/cuda/fp8.h"
#include "model/cuda/packed.h"

namespace kvasir::model::cuda {
namespace {

using attention::cuda::check;

// Sums of pieces of k, of as many rows at a time as fit; elements of a weight's rows that are widened at a time.
constexpr int64_t kSums = int64_t(4) << 20, kWidened = int64_t(16) << 20;
constexpr uint64_t kPrime = 1099511628211ull;

int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }
int64_t factor_bytes(int64_t outputs, int64_t inputs) {
  return tiles_of(outputs) * tiles_of(inputs) * kFactorTileBytes;
}

// What loads one adapter, on a stream of its own.
class Loading {
 public:
  ~Loading() {
    if (stream_) cudaStreamSynchronize(stream_), cudaStreamDestroy(stream_);
  }
  Status begin(std::span<const LowRank> changes) {
    KVASIR_TRY(check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "an adapter's stream"));
    int64_t a = 0, b = 0;
    for (const LowRank& c : changes) a = std::max(a, c.a.rows * c.a.cols), b = std::max(b, c.b.rows * c.b.cols);
    KVASIR_TRY(a_.allocate(size_t(a) * 4));
    return b_.allocate(size_t(b) * 4);
  }
  // Both factors to where `part` says, and DoRA's.
  Status put(const LowRank& c, const Weight& weight, void* a, const LowRankPart& part) {
    KVASIR_TRY(upload(c.a, a_));
    KVASIR_TRY(upload(c.b, b_));
    launch_pack_factor(a_.as<float>(), c.a.rows, c.a.cols, 1, nullptr, a, stream_);
    if (part.factors) KVASIR_TRY(stretch(c, weight, const_cast<float*>(part.factors)));
    launch_pack_factor(b_.as<float>(), c.b.rows, c.b.cols, c.scale, part.factors, const_cast<void*>(part.b), stream_);
    return check(cudaGetLastError(), "an adapter's factors");
  }
  Status end(void* to, const std::vector<LowRankWeight>& table) {
    KVASIR_TRY(
        check(cudaMemcpyAsync(to, table.data(), table.size() * sizeof(LowRankWeight), cudaMemcpyHostToDevice, stream_),
              "an adapter's table"));
    return check(cudaStreamSynchronize(stream_), "an adapter");
  }

 private:
  Status upload(const HostTensor& t, const DeviceMemory& to) {
    host_.resize(size_t(t.rows * t.cols));
    for (int64_t r = 0; r < t.rows; ++r)
      dequantize(t.type, t.data + r * t.row_bytes(), t.cols, host_.data() + r * t.cols);
    KVASIR_TRY(check(cudaMemcpyAsync(to.get(), host_.data(), host_.size() * 4, cudaMemcpyHostToDevice, stream_),
                     "an adapter's factor"));
    return check(cudaStreamSynchronize(stream_), "an adapter's factor");  // the host's copy is used again
  }
  Status stretch(const LowRank& c, const Weight& w, float* factors) {
    const int64_t rows = c.b.rows, rank = c.a.rows;
    KVASIR_TRY(magnitudes_.upload(c.magnitude.data(), c.magnitude.size() * 4));
    const int64_t most = std::max<int64_t>(1, w.packing == Packing::bf16 ? rows : kWidened / w.cols);
    for (int64_t first = 0; first < rows; first += most) {
      const int64_t count = std::min(most, rows - first), from = c.first + first;
      const void* half = w.data.bytes() + from * w.cols * 2;
      if (w.packing != Packing::bf16) {
        if (!widened_.get()) KVASIR_TRY(widened_.allocate(size_t(std::max(kWidened, w.cols)) * 2));
        half = widened_.get();
        if (w.packing == Packing::fp8)
          launch_from_bytes({w.data.bytes() + from * w.cols, w.scales.as<float>() + from}, widened_.get(), count,
                            w.cols, stream_);
        else
          launch_unpack(w.packing, w.data.get(), w.unit, w.half, widened_.get(), from, count, w.cols, stream_);
      }
      launch_stretch(half, a_.as<float>(), b_.as<float>() + first * rank, c.scale, magnitudes_.as<float>() + first,
                     rank, count, w.cols, factors + first, stream_);
    }
    return check(cudaStreamSynchronize(stream_), "an adapter's magnitudes");
  }

  cudaStream_t stream_ = nullptr;
  std::vector<float> host_;
  DeviceMemory a_, b_, magnitudes_, widened_;
};

}  // namespace

LastStep::~LastStep() {
  if (event_) cudaEventDestroy(event_);
}
Status LastStep::make() {
  return check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming | cudaEventBlockingSync), "event");
}
Status LastStep::record(cudaStream_t stream) { return check(cudaEventRecord(event_, stream), "step"); }

Result<std::shared_ptr<const CudaAdapter>> CudaAdapter::make(std::span<const LowRank> changes, size_t weights,
                                                             int64_t room, const WeightOf& weight_of,
                                                             std::shared_ptr<const LastStep> last_step) {
  auto out = std::make_shared<CudaAdapter>();
  out->last_step_ = std::move(last_step);
  out->needs_.resize(weights);
  // Where everything lies: the table, then each weight's factors; what this counts are offsets until there is memory.
  std::vector<LowRankWeight> table(weights);
  std::vector<std::vector<const LowRank*>> by_weight(weights);
  int64_t bytes = aligned(int64_t(weights * sizeof(LowRankWeight)));
  for (const LowRank& c : changes) {
    auto& of_weight = by_weight[size_t(c.weight.id)];
    for (const LowRank* other : of_weight)
      if (c.first < other->first + other->b.rows && other->first < c.first + c.b.rows)
        return invalid_argument("two modules of the adapter change the same rows of a weight");
    of_weight.push_back(&c);
    out->rank_ = std::max(out->rank_, c.a.rows);
    if (c.a.cols % kFactorTileSide != 0)
      return unimplemented(
          cat("an adapter of a weight with ", c.a.cols, " columns; on a GPU they are a multiple of ", kFactorTileSide));
  }
  struct Place {
    const LowRank* change;
    int64_t a, b;
  };
  std::vector<Place> places;
  for (size_t id = 0; id < weights; ++id) {
    LowRankWeight& w = table[id] = {};
    KVASIR_CHECK(by_weight[id].size() <= LowRankWeight::kMostParts, by_weight[id].size(), " parts of a weight");
    Need& need = out->needs_[id];
    for (const LowRank* c : by_weight[id]) {
      LowRankPart& part = w.part[w.parts++];
      part = {nullptr, nullptr, int32_t(c->first), int32_t(c->b.rows), int32_t(tiles_of(c->a.rows)), w.ranks};
      places.push_back({c, bytes, 0});
      bytes += factor_bytes(c->a.rows, c->a.cols);  // behind that of the part before
      w.ranks += part.ranks;
      need.blocks += int32_t((c->b.rows + kBlockFeatures - 1) / kBlockFeatures);
      need.stretches |= !c->magnitude.empty();
    }
    need.ranks = w.ranks;
    for (size_t i = places.size() - by_weight[id].size(); i < places.size(); ++i) {
      const LowRank& c = *places[i].change;
      places[i].b = bytes;
      bytes = aligned(bytes + factor_bytes(c.b.rows, c.b.cols) + int64_t(c.magnitude.size()) * 4);
    }
    out->shape_ = ((out->shape_ * kPrime ^ uint64_t(need.ranks)) * kPrime ^ uint64_t(need.blocks)) * 2 + need.stretches;
  }
  out->bytes_ = bytes;
  if (bytes > room)
    return resource_exhausted(cat("the adapter takes ", bytes, " bytes, and there is room for ", room,
                                  ": unload another, or serve with more lora_memory"));
  if (!out->memory_.allocate(size_t(bytes)).ok()) {
    cudaGetLastError();
    return resource_exhausted(cat("the GPU has no ", bytes,
                                  " bytes left for the adapter: name it with lora, so that it is ",
                                  "loaded before the cache, or serve with less kv_memory"));
  }
  Loading loading;
  KVASIR_TRY(loading.begin(changes));
  std::byte* base = out->memory_.bytes();
  for (size_t id = 0, i = 0; id < weights; ++id)
    for (int32_t p = 0; p < table[id].parts; ++p, ++i) {
      const Place& at = places[i];
      const LowRank& c = *at.change;
      LowRankPart& part = table[id].part[p];
      if (p == 0) table[id].a = base + at.a;
      part.b = base + at.b;
      if (!c.magnitude.empty())
        part.factors = reinterpret_cast<const float*>(base + at.b + factor_bytes(c.b.rows, c.b.cols));
      KVASIR_TRY(loading.put(c, weight_of(c.weight), base + at.a, part));
    }
  KVASIR_TRY(loading.end(base, table));
  return std::shared_ptr<const CudaAdapter>(std::move(out));
}

// ---- a step's rows

Status AdapterRows::make_room(int64_t max_tokens) {
  auto last_step = std::make_shared<LastStep>();
  KVASIR_TRY(last_step->make());
  // As many tiles as rows, and rounded up.
  const auto bytes = size_t(std::bit_ceil(uint64_t(max_tokens)) * sizeof(LowRankTile) + uint64_t(max_tokens) * 4);
  for (int slot : {0, 1}) {
    KVASIR_TRY(device_[slot].allocate(bytes));
    KVASIR_TRY(host_[slot].allocate(bytes));
  }
  KVASIR_TRY(sums_.allocate(size_t(kSums) * 4));
  max_tokens_ = max_tokens;
  last_step_ = std::move(last_step);
  return {};
}

Result<AdapterPtr> AdapterRows::load(std::span<const LowRank> changes, size_t weights, int64_t room, int64_t max_tokens,
                                     const CudaAdapter::WeightOf& weight_of) {
  {
    std::lock_guard lock(loading_);
    if (!last_step_) KVASIR_TRY(make_room(max_tokens));
  }
  KVASIR_ASSIGN(auto adapter, CudaAdapter::make(changes, weights, room, weight_of, last_step_));
  return AdapterPtr(std::move(adapter));
}

// The launches of a step must have room for each of its adapters.
void AdapterRows::choose_shapes(std::vector<uint64_t> shapes, const std::vector<const CudaAdapter*>& adapters) {
  if (shapes == shapes_) return;
  shapes_ = std::move(shapes);
  needs_.assign(adapters[0]->needs().size(), {});
  for (const CudaAdapter* a : adapters)
    for (size_t i = 0; i < needs_.size(); ++i) {
      const CudaAdapter::Need& n = a->needs()[i];
      needs_[i] = {std::max(needs_[i].ranks, n.ranks), std::max(needs_[i].blocks, n.blocks),
                   needs_[i].stretches || n.stretches};
    }
}

Status AdapterRows::begin(const Batch& batch, int32_t rank, int slot, cudaStream_t stream) {
  tiles_ = 0, key_ = 0, slot_ = slot;
  std::vector<const CudaAdapter*> adapters;
  std::vector<std::vector<int32_t>> rows;  // of each
  for (size_t s = 0; s < batch.adapters.size(); ++s) {
    if (!batch.adapters[s]) continue;
    const auto* adapter = static_cast<const CudaAdapter*>(&batch.adapters[s]->part(rank));
    const size_t i = size_t(std::find(adapters.begin(), adapters.end(), adapter) - adapters.begin());
    if (i == adapters.size()) adapters.push_back(adapter), rows.emplace_back();
    for (int64_t t = batch.seqstarts[s]; t < batch.seqstarts[s + 1]; ++t) rows[i].push_back(int32_t(t));
  }
  if (adapters.empty()) return {};
  std::vector<uint64_t> shapes;
  for (const CudaAdapter* a : adapters) shapes.push_back(a->shape());
  std::sort(shapes.begin(), shapes.end());
  shapes.erase(std::unique(shapes.begin(), shapes.end()), shapes.end());
  choose_shapes(std::move(shapes), adapters);

  size_t most = 0;
  for (const auto& r : rows) most = std::max(most, r.size());
  tile_rows_ = most > 2 * kFewTileRows ? kManyTileRows : kFewTileRows;
  auto* tiles = host_[slot].as<LowRankTile>();
  int32_t listed = 0;
  for (size_t i = 0; i < adapters.size(); ++i)
    for (size_t first = 0; first < rows[i].size(); first += size_t(tile_rows_)) {
      const auto count = int32_t(std::min(rows[i].size() - first, size_t(tile_rows_)));
      tiles[tiles_++] = {adapters[i]->weights(), listed, count};
      listed += count;
    }
  const auto padded = int64_t(std::bit_ceil(uint64_t(tiles_)));  // few kinds of steps
  while (tiles_ < padded) tiles[tiles_++] = {nullptr, 0, 0};
  auto* list = reinterpret_cast<int32_t*>(tiles + tiles_);
  for (const auto& r : rows) list = std::copy(r.begin(), r.end(), list);
  key_ = uint64_t(tiles_) * 2 + (tile_rows_ == kManyTileRows);
  for (uint64_t shape : shapes_) key_ = key_ * kPrime ^ shape;
  key_ += key_ == 0;
  return check(cudaMemcpyAsync(device_[slot].get(), tiles,
                               size_t(tiles_) * sizeof(LowRankTile) + size_t(listed) * sizeof(int32_t),
                               cudaMemcpyHostToDevice, stream),
               "adapters");
}

LowRankProduct AdapterRows::product(Matrix weight, void* out, int64_t n, bool added) const {
  const CudaAdapter::Need& need = needs_[size_t(weight.id)];
  LowRankProduct p;
  p.tiles = device_[slot_].as<LowRankTile>();
  p.rows = reinterpret_cast<const int32_t*>(p.tiles + tiles_);
  p.count = tiles_, p.tile_rows = tile_rows_;
  p.weight = weight.id;
  p.ranks = need.ranks, p.blocks = need.blocks;
  p.sums = sums_.as<float>();
  p.out = out, p.n = n;
  if (added && need.stretches) p.saved = saved_.at(n).as<float>();
  return p;
}

// Some tiles at a time, where the sums of all have no room.
template <class F>
Status AdapterRows::each(LowRankProduct p, const F& launch) {
  const int64_t of_tile =
      std::max<int64_t>(1, p.k == 0 ? 1 : low_rank_splits(p.k)) * p.ranks * kFactorTileSide * p.tile_rows;
  const int64_t most = std::clamp<int64_t>(kSums / of_tile, 1, 65535), all = p.count;
  for (int64_t first = 0; first < all; first += most) {
    p.count = std::min(most, all - first);
    launch(p);
    p.tiles += p.count;
  }
  return check(cudaGetLastError(), "adapters");
}

Status AdapterRows::before_adding(Matrix weight, void* out, int64_t n, cudaStream_t stream) {
  if (!changes(weight) || !needs_[size_t(weight.id)].stretches) return {};
  if (DeviceMemory& saved = saved_[n]; !saved.get()) KVASIR_TRY(saved.allocate(size_t(max_tokens_ * n) * 4));
  return each(product(weight, out, n, true), [&](const LowRankProduct& p) { launch_take_out(p, stream); });
}

Status AdapterRows::add(Matrix weight, const void* in, int64_t k, void* out, bool half, int64_t n, bool added,
                        cudaStream_t stream) {
  if (!changes(weight)) return {};
  LowRankProduct p = product(weight, out, n, added);
  p.in = in, p.k = k, p.half = half;
  return each(p, [&](const LowRankProduct& some) { launch_low_rank(some, stream); });
}

}  // namespace kvasir::model::cuda
