// Back ends are a registry: reference, cpu, cuda. Plan and run are separate: plan() validates the host
// arrays of one step and decides tiles and splits as plain data; run() launches, allocates nothing and
// validates nothing.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "attention/params.h"
#include "core/status.h"
#include "core/thread_pool.h"

namespace kvasir::attention {

// What a plan must have room for; arrays and workspace are sized once, from these.
struct Limits {
  int64_t max_batch = 0;   // sequences in a step
  int64_t max_tokens = 0;  // new tokens in a step
  int64_t max_kvlen = 0;
  int64_t max_pages = 0;     // row length of a page table
  int64_t cache_tokens = 0;  // MaxT of every cache the steps touch: plan() checks each index against it
};

class Attention {
 public:
  virtual ~Attention() = default;
  // Validate and plan one step. Nothing is written to any cache if it fails.
  virtual Status plan(const Step& step) = 0;
  // Append (unless Attributes::append is false) and attend, for one layer of the planned step.
  virtual Status run(const Tensors& tensors) = 0;
  // KVC alone, for the planned step.
  virtual Status store_and_gather(const KvcTensors& tensors) = 0;
};

struct DeviceContext {
  ThreadPool* pool = nullptr;  // CPU back ends
  void* stream = nullptr;      // cudaStream_t
};

// Copies between the host and the memory a back end reads. Each call has finished when it returns.
class Transfer {
 public:
  virtual ~Transfer() = default;
  virtual Result<void*> allocate(size_t bytes) const = 0;
  virtual void release(void* memory) const = 0;
  virtual Status to_device(void* to, const void* from, size_t bytes) const = 0;
  virtual Status to_host(void* to, const void* from, size_t bytes) const = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;
  // OK, or why this back end cannot run here ("no CUDA driver").
  virtual Status available() const = 0;
  // Null: tensors are in host memory.
  virtual const Transfer* transfer() const { return nullptr; }
  virtual Result<std::unique_ptr<Attention>> create(const Attributes&, const Limits&, const DeviceContext&) const = 0;
};

// All that were compiled in, best first; `find_backend` names the known ones when it fails.
const std::vector<const Backend*>& backends();
Result<const Backend*> find_backend(std::string_view name);

}  // namespace kvasir::attention
