// Latent attention on Hopper: one key head of 576 columns for all query heads, and values that are the last 512 of
// them.
#pragma once

#include "attention/cuda/launch.h"

namespace kvasir::attention::cuda {

constexpr int kLatentDim = 576, kLatentRope = 64, kLatentValues = kLatentDim - kLatentRope;

// Query heads of a tile of rows; 0: no kernel takes this. Columns of results that nobody reads are `unread`.
int latent_group(const Shape&, const CacheLayer&, int unread, int compute_capability);

// Where queries lie: rows of 576 one after another by head, tokens `stride` elements apart. `rotate`: their first 64
// columns are still to be rotated.
struct LatentQueries {
  const void* data = nullptr;
  int64_t stride = 0;
  bool rotate = false;
};
cudaError_t launch_latent(const Shape&, const StepView&, const Layer&, const LatentQueries&, const StreamList&,
                          int group, cudaStream_t);
void launch_latent_merge(const Shape&, const StepView&, const Layer&, int64_t queries, cudaStream_t);

}  // namespace kvasir::attention::cuda
