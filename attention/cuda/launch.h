// One function a kernel: grid and shared memory are chosen here, and every argument is plain data.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/cuda/types.h"

namespace kvasir::attention::cuda {

void launch_append(const Shape&, const StepView&, const Layer&, int64_t tokens, bool queries, bool store, int phase,
                   cudaStream_t);
// What it chooses from: every variant; and the rows that models have. They leave the same bits.
void launch_append_any(const Shape&, const StepView&, const Layer&, int64_t tokens, bool queries, bool store, int phase,
                       cudaStream_t);
bool append_tokens_takes(const Shape&, const CacheLayer&);
void launch_append_tokens(const Shape&, const StepView&, const Layer&, int64_t tokens, bool queries, bool store,
                          cudaStream_t);
void launch_gather(const Shape&, const StepView&, const CacheLayer&, void* k_out, void* v_out, DType type, int repeat,
                   bool old, int64_t sequences, cudaStream_t);
void launch_rope(const StepView&, const float* inv_freq, int half, float magnitude, int64_t ranks, int64_t tokens,
                 float* out, cudaStream_t);

// Right for every variant, fast for none.
void launch_plain(const Shape&, const StepView&, const Layer&, const QueryRow* rows, int64_t count, cudaStream_t);

// Streams the cache once for up to kTileRows[list] query rows a warp (mma.sync, sm_80 and later).
struct StreamList {
  const Segment* segments = nullptr;
  const PartHead* heads = nullptr;  // [count]
  int32_t count = 0;
  // Above 0: so many blocks have one kv head of an item between them, each as many parts as warps.
  int32_t blocks_per_head = 0;
};
// Warps of list's kernel that a multiprocessor holds; 0: not for this shape and cache.
int stream_warps(const Shape&, const CacheLayer&, int list);
// Of a block of the first list that has a multiprocessor to itself; 0: none does.
int shared_warps(const Shape&, const CacheLayer&);
// Whether the first list's warps may append where no blocks share a kv head.
bool runs_append(const Shape&, const CacheLayer&);
void launch_stream(const Shape&, const StepView&, const Layer&, const StreamList&, int which, cudaStream_t);
// Prefixes that many queries share (wgmma), beside what the stream kernels read: launched right after them.
bool shared_prefix_supports(const Shape&, const CacheLayer&, int64_t page_size, int compute_capability);
cudaError_t launch_shared_prefix(const Shape&, const StepView&, const Layer&, const Segment* runs, int64_t count,
                                 int64_t cache_tokens, cudaStream_t);
// `fixed`: the order of summing is a function of the query alone.
void launch_merge(const Shape&, const StepView&, const Layer&, int64_t queries, bool fixed, cudaStream_t);

// Hopper's prefill: wgmma fed by the tensor memory accelerator. Query, new and gathered K/V are [rows, heads, D].
bool prefill_supports(const Shape&, int compute_capability);
cudaError_t launch_prefill(const Shape&, const StepView&, const Layer&, const PrefillTile*, int64_t tiles,
                           const TileQueue&, int64_t query_rows, int64_t new_rows, int64_t old_rows,
                           int multiprocessors, cudaStream_t);

}  // namespace kvasir::attention::cuda
