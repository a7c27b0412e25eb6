// One operator call on a cache of its own: what a thread of the bench repeats.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "attention/backend.h"

namespace kvasir::bench {

struct CacheKind {
  const char* name;
  DType type;
  kvcache::QuantKind quant;
  int group;  // elements a scale (float16), QuantKind::group only
};

struct CallShape {
  CacheKind kind;
  int heads = 0, kv_heads = 0, head_dim = 0;
  int64_t past = 0, fresh = 0;
};

// Memory on huge pages where the system gives them.
class HugeMemory {
 public:
  explicit HugeMemory(size_t bytes);
  ~HugeMemory();
  HugeMemory(const HugeMemory&) = delete;
  char* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  char* data_;
  size_t size_;
};

// Bytes of K, V and scales of one token of such a cache.
int64_t token_bytes(const CallShape& shape);

// A planned call of one sequence whose pages of 64 tokens lie in random order in `cache`.
class Workload {
 public:
  Workload(const CallShape& shape, HugeMemory& cache);
  void run();

 private:
  std::vector<char> query_, key_, value_, output_, scales_;
  std::unique_ptr<attention::Attention> op_;
  attention::Tensors tensors_;
};

// Random elements of the kind's type all over the memory.
void fill(HugeMemory& cache, const CacheKind& kind);

}  // namespace kvasir::bench
