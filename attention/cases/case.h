// One call of an operator with all of its memory on the host: what a stored case holds, what the random
// generator makes, what a back end's test runs. Knows nothing of any back end.
#pragma once

#include <string>
#include <vector>

#include "attention/backend.h"
#include "attention/params.h"
#include "core/status.h"

namespace kvasir::attention {

using Bytes = std::vector<uint8_t>;

enum class Op { attention, cache_attention, key_value_cache };
const char* op_name(Op op);  // "MultiHeadCacheAttention"

struct Case {
  Op op = Op::cache_attention;
  Attributes attributes;
  int revision = 2, layout = 0;  // the published shape that view's strides came from
  kvcache::CacheView view;       // data and scale point at `cache` and `scale` below only after tensors()
  int32_t layer = 0;
  int32_t num_repeat = 1;

  std::vector<int64_t> seqstarts{0}, kvstarts{0}, start_pos, cachestarts;
  int64_t max_pages = 0, decoding_batches = 0, max_seqlen = 0, max_kvlen = 0;
  std::vector<int32_t> indirection;
  int32_t beam_width = 0;

  Bytes query, key, value, qkv_bias, attn_mask;  // of io dtype
  int64_t mask_head_stride = 0, mask_row_stride = 0;
  std::vector<float> sink_logits;
  Bytes cache, scale;  // modified by a run

  int64_t batch() const { return int64_t(start_pos.size()); }
  int64_t tokens() const { return seqstarts.back(); }
  Step step() const;      // points into this case
  Limits limits() const;  // just enough room for it
};

struct CaseOutput {
  Bytes output;            // [T, Hq, D] of out dtype
  std::vector<float> lse;  // [T, Hq]
  Bytes key, value;        // KeyValueCache
};

// Pointers into the case and a result of the right size (filled with `fill`, to see what is written).
Tensors case_tensors(Case& c, CaseOutput* out, uint8_t fill = 0);
KvcTensors case_kvc_tensors(Case& c, CaseOutput* out, uint8_t fill = 0);

// Create, plan, validate, run; through device memory where the back end wants it. The case's cache and
// scale are modified; nothing is when it fails.
Status run_case(Case& c, const Backend& backend, const DeviceContext& context, CaseOutput* out);

}  // namespace kvasir::attention
