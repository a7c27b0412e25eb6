// A planned step must outlive the caller's arrays: HeldStep owns copies, sized once from Limits.
#pragma once

#include <vector>

#include "attention/backend.h"
#include "attention/rules.h"

namespace kvasir::attention {

class HeldStep {
 public:
  void assign(const Attributes& a, const Step& s) {
    copy(seqstarts_, s.seqstarts, s.batch + 1);
    copy(kvstarts_, s.kvstarts, s.batch + 1);
    copy(start_pos_, s.start_pos, s.batch);
    int64_t entries = 0;
    if (s.batch > 0) switch (a.index_mode) {
        case kvcache::IndexMode::offset: entries = s.batch; break;
        case kvcache::IndexMode::page_table: entries = s.batch * s.max_pages; break;
        case kvcache::IndexMode::token_table: entries = s.kvstarts[s.batch]; break;
      }
    copy(cachestarts_, s.cachestarts, entries);
    copy(indirection_, s.cache_indirection, s.cache_indirection ? s.batch * s.max_kvlen : 0);
    step = s;
    if (s.batch == 0) seqstarts_.assign(1, 0), kvstarts_.assign(1, 0);
    step.seqstarts = seqstarts_.data();
    step.kvstarts = kvstarts_.data();
    step.start_pos = start_pos_.data();
    step.cachestarts = cachestarts_.data();
    step.cache_indirection = s.cache_indirection ? indirection_.data() : nullptr;
    step.shared_group = nullptr;
    step.shared_len = nullptr;
    index = {a.index_mode, a.page_size, cachestarts_.data(), s.max_pages};
  }

  SequenceShape shape(int64_t b) const {
    return {step.seqstarts[b + 1] - step.seqstarts[b], step.kvstarts[b + 1] - step.kvstarts[b], step.start_pos[b],
            b < step.decoding_batches};
  }
  int64_t tokens() const { return step.seqstarts[step.batch]; }
  // The cache token that holds slot `slot` of sequence b.
  int64_t physical(int64_t b, int64_t slot) const { return kvcache::physical_token(index, step.kvstarts, b, slot); }
  // The sequence whose index row holds token t of sequence b: its own, or another beam of its group.
  int64_t owner(int64_t b, int64_t t) const {
    if (!step.cache_indirection) return b;
    return b - b % step.beam_width + step.cache_indirection[b * step.max_kvlen + t];
  }

  Step step;  // points into the copies
  kvcache::CacheIndex index;

 private:
  template <class T>
  static void copy(std::vector<T>& to, const T* from, int64_t n) {
    if (n > 0 && from)
      to.assign(from, from + n);
    else
      to.clear();
  }
  std::vector<int64_t> seqstarts_, kvstarts_, start_pos_, cachestarts_;
  std::vector<int32_t> indirection_;
};

}  // namespace kvasir::attention
