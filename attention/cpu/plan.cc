#include "attention/cpu/plan.h"

#include <algorithm>

namespace kvasir::attention::cpu {
namespace {

// Packing a key costs about as much as eight rows of arithmetic on it.
int64_t cost_of(int64_t keys, int64_t rows) { return (keys + 16) * (rows + 8); }

}  // namespace

int block_tokens(const Attributes& a) {
  if (a.streaming_positions) return 1;  // a key's position depends on who looks
  return std::max(1, kBlockRows / (a.num_heads / a.num_kv_heads));
}

void make_plan(const Attributes& a, const std::vector<SequenceShape>& shapes, const PlanLimits& limits, Plan* plan) {
  plan->items.clear();
  plan->merges.clear();
  plan->partial_rows = 0;
  const int group = a.num_heads / a.num_kv_heads, block = block_tokens(a);

  int64_t total = 0;
  for (size_t b = 0; b < shapes.size(); ++b) {
    const SequenceShape& s = shapes[b];
    for (int64_t begin = 0; begin < s.seqlen; begin += block) {
      int64_t end = std::min<int64_t>(begin + block, s.seqlen);
      Visible first = visible_keys(a, s, begin), last = visible_keys(a, s, end - 1);
      int64_t keys = last.hi - first.lo + last.sink_end;
      for (int h = 0; h < a.num_kv_heads; ++h) {
        AttendItem item{int32_t(b), h, int32_t(begin), int32_t(end), 0, int32_t((last.hi + kSplit - 1) / kSplit)};
        item.cost = cost_of(keys, (end - begin) * group);
        total += item.cost;
        plan->items.push_back(item);
      }
    }
  }

  // An item dearer than a fraction of one thread's share is cut along its keys.
  const int64_t share = total / (int64_t(limits.threads) * 4) + 1;
  if (limits.threads > 1) {
    const size_t whole = plan->items.size();
    for (size_t i = 0; i < whole; ++i) {
      AttendItem item = plan->items[i];
      const int64_t rows = int64_t(item.token_end - item.token_begin) * group, splits = item.split_end;
      if (splits < 2 || item.cost <= share || plan->partial_rows + splits * rows > limits.max_partial_rows) continue;
      const int64_t parts = std::min(splits, (item.cost + share - 1) / share);
      plan->merges.push_back(
          {item.sequence, item.kv_head, item.token_begin, item.token_end, int32_t(splits), plan->partial_rows});
      for (int64_t p = 0; p < parts; ++p) {
        AttendItem part = item;
        part.split_begin = int32_t(splits * p / parts);
        part.split_end = int32_t(splits * (p + 1) / parts);
        part.partial = plan->partial_rows + part.split_begin * rows;
        part.cost = item.cost / parts;
        if (p == 0)
          plan->items[i] = part;
        else
          plan->items.push_back(part);
      }
      plan->partial_rows += splits * rows;
    }
  }
  std::stable_sort(plan->items.begin(), plan->items.end(),
                   [](const AttendItem& x, const AttendItem& y) { return x.cost > y.cost; });
}

}  // namespace kvasir::attention::cpu
