#include "model/cuda/packed_kernel.cuh"

namespace kvasir::model::cuda {

template void launch_few<Packing::e4m3>(const void*, const void*, float, void*, int64_t, int64_t, int64_t, Form,
                                        cudaStream_t);

}  // namespace kvasir::model::cuda
