#include "model/cuda/rank.h"

#include <algorithm>

#include "core/check.h"
#include "model/cache_form.h"
#include "model/cuda/kernels.h"
#include "model/draws.h"

namespace kvasir::model::cuda {
namespace {

using attention::cuda::check;

constexpr int64_t kLogitRows = 512;  // logits of so many rows are made at a time

}  // namespace

Rank::~Rank() {
  const OnDevice on(device_);
  if (stream_) cudaStreamSynchronize(stream_);
  graphs_.reset();
  network_.reset();
  ops_.reset();
  for (Slot& s : slots_)
    if (s.done) cudaEventDestroy(s.done);
  if (stream_) cudaStreamDestroy(stream_);
}

Status Rank::load(Weights& weights, const attention::Backend* attention, const LoadProgress& progress,
                  const Load& network) {
  KVASIR_TRY(check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream"));
  CudaOptions o;
  o.max_batch = options_.max_batch;
  o.max_tokens = options_.max_tokens;
  o.max_kvlen = options_.max_kvlen;
  o.max_logit_rows = std::min(kLogitRows, options_.max_tokens);
  o.page_size = options_.page_size;
  o.index_mode = options_.index_mode;
  o.attention = attention;
  o.load_threads = load_threads_;
  o.batch_invariant = options_.batch_invariant;
  KVASIR_ASSIGN(o.quantize, parse_quantize(options_.quantize));
  o.runner = options_;
  o.part = config_.part;
  o.link = link_;
  ops_.emplace(o, stream_);
  KVASIR_TRY(ops_->prepare());
  KVASIR_ASSIGN(network_, network ? network(*ops_) : load_network(config_, weights, *ops_, progress));
  ops_->end_load();
  if (options_.graphs) graphs_.emplace(stream_);
  const auto rows = size_t(ops_->most_rows());
  for (Slot& s : slots_) {
    KVASIR_TRY(check(cudaEventCreateWithFlags(&s.done, cudaEventDisableTiming), "event"));
    KVASIR_TRY(first() ? s.drawn.allocate(rows * sizeof(DeviceDraw))
                       : s.device_drawn.allocate(rows * sizeof(DeviceDraw)));
    if (first()) KVASIR_TRY(s.top.allocate(rows * kMostDeviceTop * sizeof(TokenLogprob)));
    KVASIR_TRY(s.wishes.allocate(rows * sizeof(Wish)));
    KVASIR_TRY(s.device_wishes.allocate(rows * sizeof(Wish)));
  }
  return {};
}

int64_t Rank::cache_room() const {
  size_t free = 0, total = 0;
  if (cudaMemGetInfo(&free, &total) != cudaSuccess) return -1;
  return std::max<int64_t>(0, int64_t(free) - int64_t(total / 20));  // a twentieth stays for the libraries
}

Status Rank::allocate_cache(const CachePages& pages, const kvcache::CacheForm& form) {
  KVASIR_CHECK(caches_.empty() && !pages.groups.empty() && pages.groups.size() <= 2, "the cache is allocated once");
  apart_ = pages.groups.size() > 1;
  CacheLayout layout = cache_layout(config_, form, options_.page_size, apart_);
  std::vector<kvcache::CacheView> views;
  for (size_t i = 0; i < layout.shapes.size(); ++i) {
    const size_t group = apart_ ? i : 0;
    KVASIR_ASSIGN(auto cache, Cache::make(layout.shapes[i], pages.groups[group], group == 0 ? pages.host : 0));
    views.push_back(cache->view());
    caches_.push_back(std::move(cache));
  }
  KVASIR_TRY(ops_->set_states(pages.states));
  return ops_->set_caches(std::move(views), apart_, std::move(layout.places), form.tensor_scales);
}

Status Rank::move_pages(const Batch& batch) {
  // One pool of pages may lie in two caches; only one that has a second tier moves pages.
  for (size_t i = 0; i < caches_.size(); ++i) {
    const int32_t group = apart_ ? int32_t(i) : 0;
    if (group == 0) KVASIR_TRY(caches_[i]->move(batch.moves, stream_));
    for (const PageCopy& c : batch.copies)
      if (c.group == group) KVASIR_TRY(caches_[i]->copy(c, stream_));
  }
  for (const PageCopy& c : batch.copies)
    if (c.group == kvcache::kStateGroup) KVASIR_TRY(ops_->copy_state(c.from, c.to));
  return {};
}

// What the slot's last launch read of the host's memory is written again from here on; that launch is long past.
Status Rank::begin(const Batch& batch, const std::vector<int32_t>& tokens, int slot) {
  if (!first()) KVASIR_TRY(wait(slot));
  return ops_->begin(batch, tokens);
}

Status Rank::end(int slot) { return check(cudaEventRecord(slots_[size_t(slot)].done, stream_), "step"); }

Result<Buffer> Rank::decode() {
  auto step = [this]() -> Status {
    KVASIR_TRY(network_->forward());
    KVASIR_ASSIGN(decoded_, network_->logits(0, ops_->rows()));
    return {};
  };
  const uint64_t key = graphs_ && (!link_ || link_->joined()) ? ops_->key() : 0;
  KVASIR_TRY(key ? graphs_->run(key, step) : step());
  return decoded_;
}

Status Rank::make_room(const DeviceRows& rows, int slot) {
  const RankPart& part = config_.part;
  return slots_[size_t(slot)].changes.make_room(rows.changes, ops_->most_rows(),
                                                int32_t(part.vocab.whole(config_.vocab)), stream_);
}

Status Rank::draw(Buffer logits, const DeviceRows& rows, int64_t first_row, int64_t count, int slot) {
  Slot& s = slots_[size_t(slot)];
  bool some = false, random = false;
  Wish* wishes = s.wishes.as<Wish>() + first_row;
  for (int64_t i = 0; i < count; ++i) {
    wishes[i] = rows.wishes[size_t(first_row + i)];
    some |= bool(rows.there[size_t(first_row + i)]), random |= wishes[i].scale > 0;
  }
  float* from = ops_->data(logits);
  DeviceDraw* out = (first() ? s.drawn.as<DeviceDraw>() : s.device_drawn.as<DeviceDraw>()) + first_row;
  int32_t* tokens = ops_->drawn() + first_row;
  const Changes& changes = rows.changes;
  const bool changed = some && !changes.rows.empty();
  const int32_t* before = ops_->drawn_before();
  drawn_from_ = {from, first_row, count, logits.cols, before};
  if (!changes.rows.empty() && first_row == 0) KVASIR_TRY(s.changes.upload(changes, stream_));
  if (changed) KVASIR_TRY(s.changes.bias(changes, from, first_row, count, logits.cols, stream_));
  if (some) launch_greatest(from, out, tokens, count, logits.cols, stream_);
  if (changed) {
    TokenLogprob* top = first() ? s.top.as<TokenLogprob>() + first_row * kMostDeviceTop : nullptr;
    KVASIR_TRY(s.changes.before_draw(changes, from, out, before, top, first_row, count, logits.cols, stream_));
    if (changes.any_less()) launch_greatest(from, out, tokens, count, logits.cols, stream_);
  }
  if (random) {
    Wish* on_device = s.device_wishes.as<Wish>() + first_row;
    KVASIR_TRY(check(cudaMemcpyAsync(on_device, wishes, size_t(count) * sizeof(Wish), cudaMemcpyHostToDevice, stream_),
                     "draws"));
    launch_draw(from, on_device, out, tokens, count, logits.cols, stream_);
  }
  if (changed)
    KVASIR_TRY(s.changes.after_draw(changes, from, before, out, tokens, first_row, count, logits.cols, stream_));
  return check(cudaGetLastError(), "draws");
}

}  // namespace kvasir::model::cuda
