#include "bench/attention/workload.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "attention/cases/random_case.h"
#include "kvcache/quant.h"

namespace kvasir::bench {
namespace {

using namespace attention;
using kvcache::QuantKind;

constexpr int kPage = 64;

std::vector<char> random_elements(int64_t n, DType type, float scale, uint64_t seed) {
  Dice dice(seed);
  std::vector<float> x(static_cast<size_t>(n));
  for (float& f : x) f = scale * dice.normal();
  std::vector<char> bytes(size_t(dtype_bytes(type, n)));
  kvcache::encode(x.data(), n, type, bytes.data());
  return bytes;
}

[[noreturn]] void give_up(const Status& status) {
  std::fprintf(stderr, "attention_bench: %s\n", status.to_string().c_str());
  std::exit(1);
}

}  // namespace

HugeMemory::HugeMemory(size_t bytes) {
  const size_t page = size_t(2) << 20;
  size_ = (bytes + page - 1) / page * page;
  data_ = static_cast<char*>(std::aligned_alloc(page, size_));
#ifdef MADV_HUGEPAGE
  if (data_) madvise(data_, size_, MADV_HUGEPAGE);
#endif
}
HugeMemory::~HugeMemory() { std::free(data_); }

int64_t token_bytes(const CallShape& s) {
  const int64_t scales = s.kind.quant == QuantKind::group ? 2 * s.head_dim / s.kind.group : 0;
  return 2 * s.kv_heads * (dtype_bytes(s.kind.type, s.head_dim) + scales);
}

void fill(HugeMemory& cache, const CacheKind& kind) {
  const size_t block = std::min<size_t>(cache.size(), size_t(1) << 20);
  if (kind.quant == QuantKind::none) {
    const std::vector<char> x = random_elements(int64_t(block) / dtype_bytes(kind.type, 1), kind.type, 1.0f, 7);
    std::memcpy(cache.data(), x.data(), block);
  } else {
    Dice dice(7);
    for (size_t i = 0; i < block; ++i)  // 0x7f would be NaN in FP8
      cache.data()[i] = char(kind.type == DType::f8_e4m3 ? dice.bits() & 0xbf : dice.bits());
  }
  for (size_t at = block; at < cache.size(); at += block)
    std::memcpy(cache.data() + at, cache.data(), std::min(block, cache.size() - at));
}

Workload::Workload(const CallShape& s, HugeMemory& cache) {
  Attributes a;
  a.num_heads = s.heads, a.num_kv_heads = s.kv_heads, a.head_dim = s.head_dim;
  a.page_size = kPage;
  const int64_t kvlen = s.past + s.fresh, pages = (kvlen + kPage - 1) / kPage;
  const Limits limits{1, s.fresh, kvlen, pages, pages * kPage};
  auto made = (*find_backend("cpu"))->create(a, limits, {});
  if (!made.ok()) give_up(made.status());
  op_ = std::move(made).value();

  std::vector<int64_t> table(static_cast<size_t>(pages));
  for (int64_t p = 0; p < pages; ++p) table[size_t(p)] = p * kPage;
  Dice dice(3);
  for (size_t i = table.size(); i > 1; --i) std::swap(table[i - 1], table[size_t(dice.upto(int64_t(i) - 1))]);
  const int64_t seqstarts[] = {0, s.fresh}, kvstarts[] = {0, kvlen};
  Step step;
  step.batch = 1;
  step.seqstarts = seqstarts, step.kvstarts = kvstarts, step.start_pos = &s.past;
  step.cachestarts = table.data();
  step.max_pages = pages, step.max_seqlen = s.fresh, step.max_kvlen = kvlen;
  if (Status planned = op_->plan(step); !planned.ok()) give_up(planned);

  query_ = random_elements(s.fresh * s.heads * s.head_dim, a.io, 1.0f, 1);
  key_ = random_elements(s.fresh * s.kv_heads * s.head_dim, a.io, 1.0f, 2);
  value_ = random_elements(s.fresh * s.kv_heads * s.head_dim, a.io, 1.0f, 3);
  output_.resize(query_.size());
  tensors_.query = query_.data(), tensors_.key = key_.data(), tensors_.value = value_.data();
  tensors_.output = output_.data();
  kvcache::CacheView& c = tensors_.cache;
  c.data = cache.data();
  c.dtype = s.kind.type, c.quant = s.kind.quant;
  c.quant_group = s.kind.group, c.scale_dtype = DType::f16;
  c.k_scale = c.v_scale = 0.02f;
  c.max_tokens = pages * kPage, c.kv_heads = s.kv_heads, c.head_dim = s.head_dim;
  c.strides = kvcache::layout_strides(2, 3, c.max_tokens, 1, s.kv_heads, s.head_dim).value();
  if (c.quant == QuantKind::group) {
    const int groups = s.head_dim / s.kind.group;
    c.scale_strides = kvcache::layout_strides(2, 3, c.max_tokens, 1, s.kv_heads, groups).value();
    const std::vector<char> block = random_elements(4096, DType::f16, 0.02f, 5);
    scales_.resize(size_t(2 * c.max_tokens * s.kv_heads * groups * 2));
    for (size_t at = 0; at < scales_.size(); at += block.size())
      std::memcpy(scales_.data() + at, block.data(), std::min(block.size(), scales_.size() - at));
    c.scale = scales_.data();
  }
}

void Workload::run() {
  if (Status ran = op_->run(tensors_); !ran.ok()) give_up(ran);
}

}  // namespace kvasir::bench
