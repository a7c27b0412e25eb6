#include "attention/cpu/cpu.h"

#include <cstring>

#include "attention/cpu/attend.h"
#include "attention/io.h"
#include "attention/rope.h"
#include "attention/validate.h"
#include "core/cpu.h"
#include "core/thread_pool.h"
#include "kvcache/form.h"

namespace kvasir::attention {
namespace cpu {
namespace {

// 16 MiB of partial rows: enough to cut a few long sequences among many threads.
constexpr int64_t kWorkspaceFloats = int64_t(4) << 20;

class CpuAttention final : public Attention {
 public:
  CpuAttention(Attributes a, const Limits& limits, ThreadPool* pool, const Kernels& kernels, bool named)
      : a_(std::move(a)),
        limits_(limits),
        kernels_(kernels),
        named_(named),
        own_(pool ? nullptr : new ThreadPool(1)),
        pool_(pool ? *pool : *own_),
        relative_bias_(a_) {
    if (a_.alibi_slopes.empty()) a_.alibi_slopes = default_alibi_slopes(a_.num_heads);
    const int rows = block_tokens(a_) * (a_.num_heads / a_.num_kv_heads);
    for (int i = 0; i < pool_.threads(); ++i) scratch_.emplace_back(a_, rows, tile_scratch_bytes(rows));
    if (pool_.threads() > 1) {
      plan_limits_ = {pool_.threads(), kWorkspaceFloats / (padded_dim(a_.head_dim) + kPartialHead)};
      partials_ = Floats(kWorkspaceFloats);
    }
    if (a_.cyclic_capacity > 0 && a_.append)
      fresh_ = Floats(limits.max_tokens * 2 * a_.num_kv_heads * padded_dim(a_.head_dim));
    angles_.reserve(size_t(limits.max_tokens * a_.rope.rotary_dim));
    shapes_.reserve(size_t(limits.max_batch));
  }

  Status plan(const Step& step) override {
    KVASIR_TRY(validate_step(a_, limits_, step));
    held_.assign(a_, step);
    shapes_.clear();
    for (int64_t b = 0; b < held_.step.batch; ++b) shapes_.push_back(held_.shape(b));
    make_plan(a_, shapes_, plan_limits_, &plan_);
    if (a_.rope.style != RopeStyle::none) make_angles();
    owner_.resize(size_t(held_.tokens()));
    for (int64_t b = 0; b < held_.step.batch; ++b)
      for (int64_t t = held_.step.seqstarts[b]; t < held_.step.seqstarts[b + 1]; ++t) owner_[size_t(t)] = int32_t(b);
    return {};
  }

  Status run(const Tensors& tensors) override {
    const CacheKind kind = kind_of(tensors.cache);
    LayerCall call{&a_,          &kernels_,       tile_kernel_for(kind), kind,
                   &held_,       &tensors,        angles_.data(),        rank_angles_.data(),
                   fresh_.get(), partials_.get(), &relative_bias_};
    // A cyclic cache is read as it was before this call; any other after all of its writes.
    if (a_.append) each_new_token([&](int64_t t, Scratch& s) { append(call, t, s); });
    pool_.for_each(int64_t(plan_.items.size()), 1,
                   [&](int64_t i, int worker) { attend(call, plan_.items[size_t(i)], scratch_[size_t(worker)]); });
    if (!plan_.merges.empty())
      pool_.for_each(int64_t(plan_.merges.size()), 1, [&](int64_t i, int worker) {
        merge_splits(call, plan_.merges[size_t(i)], scratch_[size_t(worker)]);
      });
    if (a_.append && fresh_.get()) each_new_token([&](int64_t t, Scratch&) { keep(call, t); });
    return {};
  }

  Status store_and_gather(const KvcTensors& k) override {
    if (a_.window > 0)
      return failed_precondition("KeyValueCache gives back every token; it has no meaning with a window");
    if (a_.append) each_new_token([&](int64_t t, Scratch& s) { store(k, t, s); });
    if (!k.key_out) return {};
    for (int64_t b = 0; b < held_.step.batch; ++b)
      pool_.for_each(shapes_[size_t(b)].kvlen, 16,
                     [&](int64_t t, int worker) { gather(k, b, t, scratch_[size_t(worker)]); });
    return {};
  }

 private:
  // Matrix units read keys where they lie: not those that are rotated first.
  int64_t tile_scratch_bytes(int rows) const {
    int64_t most = 0;
    for (const TileKernel* m : kernels_.tile_kernels)
      for (const TileKernel* it = a_.streaming_positions ? nullptr : m; it; it = it->of_few)
        most = std::max(most, it->bytes(rows, a_.head_dim));
    return most;
  }
  CacheKind kind_of(const kvcache::CacheView& c) const {
    return {c.dtype, c.quant == kvcache::QuantKind::group, c.quant_group, c.head_dim, a_.num_heads / a_.num_kv_heads};
  }
  const TileKernel* tile_kernel_for(const CacheKind& kind) const {
    // A cyclic cache's new tokens are float32 beside it, and only float16 has the same sums then.
    const bool alike = kind.dtype == DType::f32 || kind.dtype == DType::f16;
    if (a_.streaming_positions || !(alike || a_.cyclic_capacity == 0)) return nullptr;
    for (const TileKernel* m : kernels_.tile_kernels)
      if (m && m->takes(kind) && (named_ || m->pays(kind))) return m;
    return nullptr;
  }

  void make_angles() {
    angles_.resize(size_t(held_.tokens() * a_.rope.rotary_dim));
    int64_t longest = 0;
    for (int64_t b = 0; b < held_.step.batch; ++b) {
      const SequenceShape& s = shapes_[size_t(b)];
      longest = std::max(longest, s.kvlen);
      for (int64_t i = 0; i < s.seqlen; ++i)
        rope_angles(a_.rope, s.start_pos + i, angles_.data() + (held_.step.seqstarts[b] + i) * a_.rope.rotary_dim);
    }
    if (!a_.streaming_positions) return;
    const int64_t have = int64_t(rank_angles_.size()) / a_.rope.rotary_dim;
    if (have >= longest) return;
    rank_angles_.resize(size_t(longest * a_.rope.rotary_dim));
    for (int64_t p = have; p < longest; ++p) rope_angles(a_.rope, p, rank_angles_.data() + p * a_.rope.rotary_dim);
  }

  template <class F>
  void each_new_token(const F& f) {
    pool_.for_each(held_.tokens(), 8, [&](int64_t t, int worker) { f(t, scratch_[size_t(worker)]); });
  }

  int64_t position(int64_t token) const {
    const int64_t b = owner_[size_t(token)];
    return held_.step.start_pos[b] + token - held_.step.seqstarts[b];
  }

  void store_row(const kvcache::CacheView& c, int64_t at, int64_t layer, int64_t head, bool value, const float* row) {
    if (c.quant != kvcache::QuantKind::none) return kvcache::store_row(c, at, layer, head, value, row);
    int64_t element = kvcache::row_element(c.strides, at, layer, head, value);
    kernels_.from_f32(row, c.dtype, a_.head_dim, static_cast<uint8_t*>(c.data) + dtype_bytes(c.dtype, element));
  }

  // New token: into the cache, or (cyclic) into `fresh` as the cache will return it.
  void append(const LayerCall& call, int64_t token, Scratch& s) {
    const kvcache::CacheView& c = call.tensors->cache;
    const int64_t b = owner_[size_t(token)], padded = padded_dim(a_.head_dim);
    const int64_t at = fresh_.get() ? 0 : held_.physical(b, position(token));
    for (int h = 0; h < a_.num_kv_heads; ++h)
      for (bool value : {false, true}) {
        if (value && kvcache::keys_alone(c)) continue;
        float* row = s.values.get();
        read_part(call, int(value ? InputPart::value : InputPart::key), token, h, row, s.row.get());
        if (!value && a_.rope.style != RopeStyle::none && !a_.streaming_positions)
          rotate(a_.rope, angles_.data() + token * a_.rope.rotary_dim, row);
        if (!fresh_.get()) {
          store_row(c, at, call.tensors->layer, h, value, row);
          continue;
        }
        float* fresh = fresh_ + ((token * 2 + value) * a_.num_kv_heads + h) * padded;
        uint8_t data[kMaxHeadDim * 4], scale[kMaxHeadDim * 4];
        kvcache::CacheView one = c;
        one.data = data, one.scale = scale;
        one.strides = one.scale_strides = {};
        kvcache::store_row(one, 0, 0, 0, value, row);
        kvcache::load_row(one, 0, 0, 0, value, fresh);
      }
  }

  // Cyclic, after attention: the new tokens that no later one replaces. They were quantized once
  // already; quantizing what that reads back as would not always give the same bytes, so start over.
  void keep(const LayerCall& call, int64_t token) {
    const int64_t b = owner_[size_t(token)], t = position(token);
    if (!survives(a_, shapes_[size_t(b)], t)) return;
    float row[kMaxHeadDim], spare[kMaxHeadDim];
    for (int h = 0; h < a_.num_kv_heads; ++h)
      for (bool value : {false, true}) {
        read_part(call, int(value ? InputPart::value : InputPart::key), token, h, row, spare);
        if (!value && a_.rope.style != RopeStyle::none && !a_.streaming_positions)
          rotate(a_.rope, angles_.data() + token * a_.rope.rotary_dim, row);
        store_row(call.tensors->cache, held_.physical(b, cache_slot(a_, t)), call.tensors->layer, h, value, row);
      }
  }

  void store(const KvcTensors& k, int64_t token, Scratch& s) {
    const int64_t at = held_.physical(owner_[size_t(token)], position(token));
    for (int h = 0; h < a_.num_kv_heads; ++h)
      for (bool value : {false, true}) {
        if (value && kvcache::keys_alone(k.cache)) continue;
        const void* from = value ? k.value : k.key;
        const int64_t element = (token * a_.num_kv_heads + h) * a_.head_dim;
        if (a_.io == DType::i8) {  // quantized already: the bytes are stored as they are
          std::memcpy(
              static_cast<uint8_t*>(k.cache.data) + kvcache::row_element(k.cache.strides, at, k.layer, h, value),
              static_cast<const uint8_t*>(from) + element, size_t(a_.head_dim));
          continue;
        }
        read_elements(from, a_.io, element, a_.head_dim, value ? k.cache.v_scale : k.cache.k_scale, s.row.get());
        store_row(k.cache, at, k.layer, h, value, s.row.get());
      }
  }

  void gather(const KvcTensors& k, int64_t b, int64_t t, Scratch& s) {
    const int64_t at = held_.physical(b, t), out_heads = int64_t(a_.num_kv_heads) * k.num_repeat;
    for (int h = 0; h < a_.num_kv_heads; ++h)
      for (bool value : {false, true}) {
        void* out = value ? k.value_out : k.key_out;
        const int64_t first = ((held_.step.kvstarts[b] + t) * out_heads + h * k.num_repeat) * a_.head_dim;
        if (a_.out == DType::i8) {  // the bytes are given back as they are
          const auto* row =
              static_cast<const uint8_t*>(k.cache.data) + kvcache::row_element(k.cache.strides, at, k.layer, h, value);
          for (int r = 0; r < k.num_repeat; ++r)
            std::memcpy(static_cast<uint8_t*>(out) + first + int64_t(r) * a_.head_dim, row, size_t(a_.head_dim));
          continue;
        }
        kvcache::load_row(k.cache, at, k.layer, h, value, s.row.get());
        for (int r = 0; r < k.num_repeat; ++r)
          write_elements(s.row.get(), a_.out, first + int64_t(r) * a_.head_dim, a_.head_dim, a_.out_scale, out);
      }
  }

  Attributes a_;
  Limits limits_;
  const Kernels& kernels_;
  bool named_;  // by whoever started the process
  std::unique_ptr<ThreadPool> own_;
  ThreadPool& pool_;
  std::vector<Scratch> scratch_;
  Floats partials_, fresh_;
  HeldStep held_;
  std::vector<SequenceShape> shapes_;
  std::vector<int32_t> owner_;  // sequence of each new token
  std::vector<float> angles_, rank_angles_;
  const RelativeBias relative_bias_;
  PlanLimits plan_limits_;
  Plan plan_;
};

class CpuBackend final : public Backend {
 public:
  std::string_view name() const override { return "cpu"; }
  Status available() const override { return {}; }
  Result<std::unique_ptr<Attention>> create(const Attributes& a, const Limits& limits,
                                            const DeviceContext& context) const override {
    KVASIR_TRY(validate_attributes(a, limits));
    if (const std::string complaint = isa_complaint(); !complaint.empty())
      return invalid_argument(complaint).with_field("KVASIR_ISA");
    return std::unique_ptr<Attention>(
        std::make_unique<CpuAttention>(a, limits, context.pool, best_kernels(), wanted_isa() != nullptr));
  }
};

}  // namespace
}  // namespace cpu

const Backend& cpu_backend() {
  static const cpu::CpuBackend backend;
  return backend;
}

}  // namespace kvasir::attention
