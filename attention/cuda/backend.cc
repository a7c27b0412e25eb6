#include <algorithm>
#include <bit>
#include <cmath>

#include "attention/cuda/cuda.h"
#include "attention/cuda/latent.h"
#include "attention/cuda/memory.h"
#include "attention/cuda/plain.h"
#include "attention/cuda/plan.h"
#include "attention/cuda/prefill8.h"
#include "attention/held_step.h"
#include "attention/rules.h"
#include "attention/validate.h"
#include "kvcache/form.h"

namespace kvasir::attention {
namespace cuda {
namespace {

class CudaAttention final : public Attention, public GraphKeyed {
 public:
  CudaAttention(const Attributes& a, const Limits& limits, const DeviceContext& context, bool appends_apart)
      : a_(a), limits_(limits), stream_(static_cast<cudaStream_t>(context.stream)), appends_apart_(appends_apart) {}
  ~CudaAttention() override {
    if (uploaded_[0]) cudaEventSynchronize(uploaded_[0]);
    for (cudaEvent_t e : uploaded_)
      if (e) cudaEventDestroy(e);
  }

  Status prepare() {
    int device = 0;
    KVASIR_TRY(check(cudaGetDevice(&device), "cudaGetDevice"));
    int major = 0, minor = 0;
    KVASIR_TRY(check(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, device), "device"));
    KVASIR_TRY(check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "device"));
    KVASIR_TRY(check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "device"));
    capability_ = major * 10 + minor;

    Shape& s = shape_;
    s.heads = a_.num_heads, s.kv_heads = a_.num_kv_heads, s.group = a_.num_heads / a_.num_kv_heads;
    s.head_dim = a_.head_dim;
    s.mode = int32_t(a_.index_mode);
    s.page_shift = a_.index_mode == kvcache::IndexMode::page_table ? std::countr_zero(uint32_t(a_.page_size)) : 0;
    s.window = a_.window, s.sinks = a_.window > 0 ? a_.sinks : 0;
    s.cyclic = a_.cyclic_capacity;
    s.streaming = a_.streaming_positions;
    s.rope_style = int32_t(a_.rope.style);
    s.rotary_dim = a_.rope.rotary_dim;
    s.packed = a_.packed_qkv;
    s.fp8_query = a_.fp8_query;
    s.scale = (a_.io == DType::f8_e4m3 ? a_.q_scale : 1.0f) / (a_.q_scaling * std::sqrt(float(a_.head_dim)));
    s.softcap = a_.softcap;
    s.io = a_.io, s.out = a_.out;
    s.out_inv_scale = a_.out == DType::f8_e4m3 ? 1.0f / a_.out_scale : 1.0f;
    s.work = a_.io == DType::f8_e4m3 ? DType::bf16 : a_.io == DType::i8 ? DType::f32 : a_.io;

    if (a_.index_mode == kvcache::IndexMode::page_table &&
        (a_.page_size > 256 || !std::has_single_bit(uint32_t(a_.page_size))))
      return unimplemented(cat("page_size is ", a_.page_size, "; the cuda back end takes powers of two up to 256"))
          .with_field("page_size");
    if (a_.out == DType::i8)
      return unimplemented("out_dtype is int8; the cuda back end gives floats and float8_e4m3").with_field("out_dtype");
    if (a_.head_dim % 8)
      return unimplemented(cat("head_dim is ", a_.head_dim, "; the cuda back end takes multiples of 8 up to 576"))
          .with_field("head_dim");
    if (!a_.relative_bias.empty()) {
      KVASIR_TRY(relative_.upload(a_.relative_bias.data(), a_.relative_bias.size() * 4));
      relative_bias_ = {relative_.as<float>(), int32_t(a_.relative_bias.size()) / a_.num_heads / 2};
    }
    if (a_.is_alibi) {
      std::vector<float> slopes = a_.alibi_slopes.empty() ? default_alibi_slopes(a_.num_heads) : a_.alibi_slopes;
      KVASIR_TRY(slopes_.upload(slopes.data(), slopes.size() * 4));
      s.slopes = slopes_.as<float>();
    }
    if (a_.rope.style != RopeStyle::none) {
      KVASIR_TRY(frequencies_.upload(a_.rope.inv_freq.data(), a_.rope.inv_freq.size() * 4));
      const int64_t half = a_.rope.rotary_dim / 2;
      // A query sees its window and what its own call brought; without append, all from its start_pos on.
      const int64_t seen = a_.append ? int64_t(a_.window) + limits_.max_tokens : limits_.max_kvlen;
      const int64_t ranks = a_.streaming_positions ? seen : 0;
      KVASIR_TRY(angles_.allocate(size_t(ranks > 0 ? ranks * half * 8 : limits_.max_tokens * half * 16)));
      (ranks > 0 ? s.rope_ranks : s.rope) = angles_.as<float>();
      if (ranks > 0)
        launch_rope({}, frequencies_.as<float>(), int(half), a_.rope.magnitude, ranks, 0, angles_.as<float>(), stream_);
    }
    const size_t io = size_t(dtype_bits(s.work) / 8);
    works_on_query_ = a_.packed_qkv || a_.rope.style != RopeStyle::none || a_.io == DType::f8_e4m3 || a_.fp8_query;
    new_bytes_ = size_t(limits_.max_tokens) * size_t(s.kv_heads * s.head_dim) * io;
    KVASIR_TRY(k_new_.allocate(new_bytes_));
    return v_new_.allocate(new_bytes_);
  }

  Status plan(const Step& step) override {
    KVASIR_TRY(validate_step(a_, limits_, step, PageStarts::multiples));
    held_ = true;
    if (!planner_) return keep(step);  // the first run says what the cache is; until then the step waits
    return upload(step);
  }

  Status run(const Tensors& t) override {
    if (!held_) return failed_precondition("run() before plan()");
    CacheLayer cache = layer_of(t.cache, t.layer);
    const bool alone = kvcache::keys_alone(t.cache), more = t.qkv_bias || t.attn_mask;
    KVASIR_TRY(learn(t.cache, cache, more));
    if (latent_group_ && more) return failed_precondition("qkv_bias or attn_mask, and the first run() had neither");
    const Launch& n = planner_->launch();
    if (n.tokens == 0) return {};
    Shape shape = shape_;
    if (a_.fp8_query) shape.scale *= t.q_scale;
    Layer l;
    l.query = t.query, l.key = t.key, l.value = alone ? t.key : t.value, l.bias = t.qkv_bias;
    // FP8 prefill takes queries as they are given; every other kernel wants them worked on.
    const bool streams = std::any_of(n.parts, n.parts + kAllLists, [](int32_t p) { return p > 0; });
    const bool queries =
        !latent_group_ && (works_on_query_ || t.qkv_bias) && (streams || n.plain || !prefill8_ || a_.fp8_query);
    if (a_.fp8_query) l.q_inverse = 1.0f / t.q_scale, l.q8 = prefill8_ ? q8_.get() : nullptr;
    l.q = queries ? q_.get() : const_cast<void*>(t.query);
    // Where the cache keeps new K/V just as they came, they are contiguous already.
    const bool given = a_.append && !a_.packed_qkv && !t.qkv_bias && a_.rope.style == RopeStyle::none &&
                       t.cache.dtype == a_.io && t.cache.quant == kvcache::QuantKind::none;
    l.k_new = given ? const_cast<void*>(t.key) : k_new_.get();
    l.v_new = alone ? l.k_new : given ? const_cast<void*>(t.value) : v_new_.get();
    l.given = given || (prefill8_ && a_.io == DType::f8_e4m3);  // E4M3 goes into an E4M3 cache as it is
    // Prefill may write the cache where nobody reads it meanwhile.
    l.stored_by_prefill =
        given && !queries && n.tiles && !n.gathers && !n.deferred && !prefill8_ && (n.apart || !streams);
    l.appended_here = n.own && queries && !alone && !appends_apart_ && (n.blocks_per_head || runs_append_) &&
                      append_tokens_takes(shape, cache);
    l.k_old = k_old_.get(), l.v_old = v_old_.get();
    l.mask = t.attn_mask, l.mask_head = t.mask_head_stride, l.mask_row = t.mask_row_stride;
    l.sink_logits = t.sink_logits;
    l.out = t.output, l.lse = a_.return_lse ? t.lse : nullptr;
    l.partial = partial_.as<float>(), l.partial_lse = partial_lse_.as<float>(), l.arrived = arrived_.as<int32_t>();
    l.cache = cache;
    const StepView v = planner_->view(device(slot_));
    std::byte* base = device(slot_);

    if (n.gathers && n.deferred)  // a ring is read as it was
      launch_gather(shape, v, cache, l.k_old, l.v_old, shape.work, 1, true, n.sequences, stream_);
    if ((a_.append || queries) && (n.outside || !l.stored_by_prefill) && !l.appended_here)
      launch_append(shape, v, l, n.tokens, queries, a_.append, 0, stream_);
    if (n.gathers && !n.deferred && !prefill8_)
      launch_gather(shape, v, cache, l.k_old, l.v_old, shape.work, 1, true, n.sequences, stream_);
    if (n.tiles && prefill8_) launch_gather8(shape, v, l, planner_->gather_tokens(), n.sequences, stream_);
    for (int list = kLists - 1; list >= 0; --list)
      if (n.parts[list])
        launch_stream(shape, v, l,
                      {planner_->segments(base, list), planner_->heads(base, list), n.parts[list],
                       list == 0 ? n.blocks_per_head : 0},
                      list, stream_);
    if (n.prefix_runs)
      KVASIR_TRY(check(
          launch_shared_prefix(shape, v, l, planner_->prefix_runs(base), n.prefix_runs, limits_.cache_tokens, stream_),
          "shared prefixes"));
    if (n.parts[kLatentList])
      KVASIR_TRY(check(launch_latent(shape, v, l, queries_of(t),
                                     {planner_->segments(base, kLatentList), planner_->heads(base, kLatentList),
                                      n.parts[kLatentList]},
                                     latent_group_, stream_),
                       "latent attention"));
    if (n.merges && latent_group_)
      launch_latent_merge(shape, v, l, n.merges, stream_);
    else if (n.merges)
      launch_merge(shape, v, l, n.merges, a_.batch_invariant, stream_);
    // What the prefill of a step reads, none of its decodes writes: it fills the multiprocessors they are done with.
    const TileQueue queue{taken_, streams};
    if (n.tiles && prefill8_)
      KVASIR_TRY(check(launch_prefill8(shape, v, l, planner_->tiles(base), n.tiles, queue, n.exact_tokens,
                                       planner_->gather_tokens(), multiprocessors_, stream_),
                       "prefill"));
    else if (n.tiles)
      KVASIR_TRY(check(launch_prefill(shape, v, l, planner_->tiles(base), n.tiles, queue, n.exact_tokens,
                                      given ? n.exact_tokens : limits_.max_tokens, planner_->gather_tokens(),
                                      multiprocessors_, stream_),
                       "prefill"));
    if (n.plain && relative_bias_.values)
      launch_plain(shape, v, l, relative_bias_, planner_->plain_rows(base), n.plain, stream_);
    else if (n.plain)
      launch_plain(shape, v, l, planner_->plain_rows(base), n.plain, stream_);
    if (n.deferred) launch_append(shape, v, l, n.tokens, false, a_.append, 1, stream_);
    return check(cudaGetLastError(), "attention");
  }

  Status store_and_gather(const KvcTensors& t) override {
    if (!held_) return failed_precondition("store_and_gather() before plan()");
    if (a_.window > 0)
      return failed_precondition("KeyValueCache gives back every token; it has no meaning with a window");
    CacheLayer cache = layer_of(t.cache, t.layer);
    KVASIR_TRY(learn(t.cache, cache, false));
    const Launch& n = planner_->launch();
    if (n.sequences == 0) return {};
    Shape s = shape_;  // KVC stores rows as they are given
    s.rope_style = 0, s.packed = 0;
    Layer l;
    l.key = t.key, l.value = t.value, l.cache = cache;
    l.k_new = k_new_.get(), l.v_new = v_new_.get();
    const StepView v = planner_->view(device(slot_));
    if (a_.append && n.tokens) launch_append(s, v, l, n.tokens, false, true, 0, stream_);
    if (t.key_out)
      launch_gather(s, v, cache, t.key_out, t.value_out, a_.out, t.num_repeat, false, n.sequences, stream_);
    return check(cudaGetLastError(), "KeyValueCache");
  }

  uint64_t launch_key() const override { return planner_ ? planner_->launch().key() * 2 + uint64_t(slot_) : 0; }

 private:
  CacheLayer layer_of(const kvcache::CacheView& c, int32_t layer) const {
    CacheLayer out;
    auto bytes = [](DType type, int64_t n) { return dtype_bytes(type, n); };
    uint8_t* data = static_cast<uint8_t*>(c.data);
    out.key = data + bytes(c.dtype, layer * c.strides.layer);
    out.value = out.key + bytes(c.dtype, c.strides.kv);
    out.token = bytes(c.dtype, c.strides.token);
    out.head = bytes(c.dtype, c.strides.head);
    out.dtype = c.dtype, out.scale_dtype = c.scale_dtype;
    out.quant = int32_t(c.quant);
    if (c.quant == kvcache::QuantKind::per_tensor) out.k_scale = c.k_scale, out.v_scale = c.v_scale;
    if (c.quant == kvcache::QuantKind::group) {
      out.quant_group = c.quant_group;
      out.group_shift = std::countr_zero(uint32_t(c.quant_group));
      out.key_scale = static_cast<uint8_t*>(c.scale) + bytes(c.scale_dtype, layer * c.scale_strides.layer);
      out.value_scale = out.key_scale + bytes(c.scale_dtype, c.scale_strides.kv);
      out.scale_token = bytes(c.scale_dtype, c.scale_strides.token);
      out.scale_head = bytes(c.scale_dtype, c.scale_strides.head);
    }
    return out;
  }

  // As they are given: latent attention's kernel rotates them itself.
  LatentQueries queries_of(const Tensors& t) const {
    const int64_t rows = a_.packed_qkv ? shape_.heads + 2 * shape_.kv_heads : shape_.heads;
    return {t.query, rows * shape_.head_dim, a_.rope.style != RopeStyle::none};
  }

  // Query heads of a tile of latent attention's kernel, where that takes this: it rotates the first 64 columns or none.
  int latent_heads(const CacheLayer& cache, bool more) const {
    const bool rotates = a_.rope.style == RopeStyle::none || a_.rope.rotary_dim == kLatentRope;
    return rotates && !more && a_.relative_bias.empty() ? latent_group(shape_, cache, a_.unread_columns, capability_)
                                                        : 0;
  }

  // Kernels and workspace depend on the kind of cache, which is first seen here; it never changes after. `more`: there
  // is what the plain kernel alone takes beside keys of 576.
  Status learn(const kvcache::CacheView& view, const CacheLayer& cache, bool more) {
    if (planner_) return {};
    KVASIR_TRY(validate_cache(a_, view, 0));
    if (view.quant == kvcache::QuantKind::group &&  // a warp finds a group's greatest, eight elements a lane
        (view.quant_group < 8 || view.quant_group > 256))
      return unimplemented(cat("quant_group is ", view.quant_group, "; the cuda back end takes from 8 to 256"))
          .with_field("quant_group");
    Machine machine;
    const bool fast = a_.relative_bias.empty();  // of which the plain kernel alone knows
    const bool alone = kvcache::keys_alone(view);
    if (shape_.group <= 16 && fast)
      // Batch-invariant: a row's arithmetic may not depend on how many stand beside it, so no kernel for a few.
      for (int i = a_.batch_invariant ? 1 : 0; i < kLists; ++i)
        machine.stream_warps[i] = multiprocessors_ * stream_warps(shape_, cache, i);
    machine.multiprocessors = multiprocessors_;
    if (machine.stream_warps[0]) {
      machine.shared_warps = shared_warps(shape_, cache);
      runs_append_ = runs_append(shape_, cache);
    }
    machine.prefill8 = prefill8_ =
        fast && prefill8_supports(shape_, cache, capability_) && a_.append && !a_.batch_invariant && !alone;
    machine.prefill = fast && !prefill8_ && prefill_supports(shape_, capability_) && !a_.batch_invariant;
    machine.shared_prefix = fast && !alone && a_.index_mode == kvcache::IndexMode::page_table &&
                            machine.stream_warps[0] > 0 &&
                            shared_prefix_supports(shape_, cache, a_.page_size, capability_);
    Attributes planned = a_;
    latent_group_ = latent_heads(cache, more);
    if (latent_group_) planned.num_kv_heads = shape_.heads / latent_group_;  // blocks of heads that read the same keys
    machine.stream_warps[kLatentList] = latent_group_ ? multiprocessors_ : 0;
    planner_ = std::make_unique<Planner>(planned, limits_, machine);
    if (!latent_group_)
      KVASIR_TRY(q_.allocate(size_t(limits_.max_tokens) * size_t(shape_.heads * shape_.head_dim) *
                             size_t(dtype_bits(shape_.work) / 8)));
    KVASIR_TRY(arrays_.allocate(2 * planner_->bytes()));
    KVASIR_TRY(pinned_.allocate(2 * planner_->bytes()));
    for (cudaEvent_t& e : uploaded_) KVASIR_TRY(check(cudaEventCreateWithFlags(&e, cudaEventDisableTiming), "event"));
    const size_t rows = size_t(planner_->slots()) * size_t(shape_.heads);
    KVASIR_TRY(partial_.allocate(rows * size_t(shape_.head_dim) * 4));
    KVASIR_TRY(partial_lse_.allocate(rows * 4));
    const size_t arrived = size_t(planner_->slots()) * size_t(shape_.kv_heads);
    KVASIR_TRY(arrived_.allocate((arrived + 2) * 4));
    KVASIR_TRY(check(cudaMemsetAsync(arrived_.get(), 0, (arrived + 2) * 4, stream_), "workspace"));
    taken_ = arrived_.as<int32_t>() + arrived;
    const size_t old = size_t(planner_->gather_tokens()) * size_t(shape_.kv_heads * shape_.head_dim) *
                       size_t(prefill8_ ? 1 : dtype_bits(shape_.work) / 8);
    const size_t q8 =
        prefill8_ && a_.fp8_query ? size_t(limits_.max_tokens) * size_t(shape_.heads * shape_.head_dim) : 0;
    if (q8 > 0) KVASIR_TRY(q8_.allocate(q8));
    KVASIR_TRY(k_old_.allocate(old));
    KVASIR_TRY(v_old_.allocate(old));
    // Prefill reads whole tiles: rows nobody wrote yet must be numbers, for a weight of zero times them to be zero.
    for (auto [memory, bytes] :
         {std::pair{&k_new_, new_bytes_}, {&v_new_, new_bytes_}, {&k_old_, old}, {&v_old_, old}, {&q8_, q8}})
      if (bytes > 0) KVASIR_TRY(check(cudaMemsetAsync(memory->get(), 0, bytes, stream_), "workspace"));
    return upload(waiting_.step);
  }

  Status keep(const Step& step) {
    waiting_.assign(a_, step);
    return {};
  }

  Status upload(const Step& step) {
    slot_ ^= 1;
    KVASIR_TRY(check(cudaEventSynchronize(uploaded_[slot_]), "plan"));  // two steps ago: long past
    std::byte* host = pinned_.bytes() + size_t(slot_) * planner_->bytes();
    planner_->plan(step, host);
    for (const Planner::Piece& p : planner_->used())
      if (p.length > 0)
        KVASIR_TRY(
            check(cudaMemcpyAsync(device(slot_) + p.offset, host + p.offset, p.length, cudaMemcpyHostToDevice, stream_),
                  "plan"));
    KVASIR_TRY(check(cudaEventRecord(uploaded_[slot_], stream_), "plan"));
    const Launch& n = planner_->launch();
    if (a_.rope.style != RopeStyle::none && !a_.streaming_positions && n.tokens > 0)
      launch_rope(planner_->view(device(slot_)), frequencies_.as<float>(), a_.rope.rotary_dim / 2, a_.rope.magnitude, 0,
                  n.tokens, angles_.as<float>(), stream_);
    return check(cudaGetLastError(), "plan");
  }

  std::byte* device(int slot) const { return arrays_.bytes() + size_t(slot) * planner_->bytes(); }

  Attributes a_;
  Limits limits_;
  cudaStream_t stream_;
  bool appends_apart_;
  Shape shape_;
  RelativeBias relative_bias_;
  int multiprocessors_ = 0, capability_ = 0;
  int latent_group_ = 0;
  bool works_on_query_ = false, held_ = false, prefill8_ = false, runs_append_ = false;
  int slot_ = 0;
  size_t new_bytes_ = 0;
  int32_t* taken_ = nullptr;
  HeldStep waiting_;
  std::unique_ptr<Planner> planner_;
  DeviceMemory slopes_, relative_, frequencies_, angles_, q_, q8_, k_new_, v_new_, k_old_, v_old_, arrays_, partial_,
      partial_lse_, arrived_;
  PinnedMemory pinned_;
  cudaEvent_t uploaded_[2] = {nullptr, nullptr};
};

Result<std::unique_ptr<Attention>> create(const Attributes& a, const Limits& limits, const DeviceContext& context,
                                          bool appends_apart) {
  KVASIR_TRY(cuda_backend().available());
  KVASIR_TRY(validate_attributes(a, limits));
  auto made = std::make_unique<CudaAttention>(a, limits, context, appends_apart);
  KVASIR_TRY(made->prepare());
  return std::unique_ptr<Attention>(std::move(made));
}

class CudaBackend final : public Backend {
 public:
  std::string_view name() const override { return "cuda"; }
  Status available() const override {
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess || n == 0) {
      cudaGetLastError();
      return unavailable(cat("no CUDA device: ", e == cudaSuccess ? "none is visible" : cudaGetErrorString(e),
                             "; the cpu back end needs none"));
    }
    return {};
  }
  Result<std::unique_ptr<Attention>> create(const Attributes& a, const Limits& limits,
                                            const DeviceContext& context) const override {
    return cuda::create(a, limits, context, false);
  }
};

}  // namespace

Result<std::unique_ptr<Attention>> create_appending_apart(const Attributes& a, const Limits& limits,
                                                          const DeviceContext& context) {
  return create(a, limits, context, true);
}

}  // namespace cuda

const Backend& cuda_backend() {
  static const cuda::CudaBackend backend;
  return backend;
}

}  // namespace kvasir::attention
