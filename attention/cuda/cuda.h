// The CUDA back end. Two steps may be in flight: each plan takes the other of two fixed device buffers, and
// launch_key() names what run() will launch, so that a captured graph can be replayed while lengths change.
#pragma once

#include "attention/backend.h"

namespace kvasir::attention {

const Backend& cuda_backend();

namespace cuda {

// What the object behind Attention* of this back end adds.
class GraphKeyed {
 public:
  virtual ~GraphKeyed() = default;
  // Equal keys: run() would launch the same kernels with the same arguments for the same Tensors.
  virtual uint64_t launch_key() const = 0;
};

// As the back end's own, but new tokens are always appended by a kernel of their own: what is compared with.
Result<std::unique_ptr<Attention>> create_appending_apart(const Attributes&, const Limits&, const DeviceContext&);

}  // namespace cuda
}  // namespace kvasir::attention
