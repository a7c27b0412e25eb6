#include <algorithm>
#include <vector>

#include "attention/rules.h"
#include "attention/validate.h"
#include "core/cat.h"

namespace kvasir::attention {
namespace {

using kvcache::IndexMode;

Status bad(const char* field, std::string message) { return invalid_argument(std::move(message)).with_field(field); }

SequenceShape shape_of(const Step& s, int64_t b) {
  return {s.seqstarts[b + 1] - s.seqstarts[b], s.kvstarts[b + 1] - s.kvstarts[b], s.start_pos[b],
          b < s.decoding_batches};
}

Status check_starts(const char* name, const int64_t* starts, int64_t batch) {
  if (starts[0] != 0) return bad(name, cat(name, "[0] is ", starts[0], "; it must be 0"));
  for (int64_t b = 0; b < batch; ++b)
    if (starts[b + 1] < starts[b])
      return bad(name, cat(name, "[", b + 1, "] is ", starts[b + 1], ", below ", name, "[", b, "], which is ",
                           starts[b], "; sequence ", b, " would have a negative length"));
  return {};
}

Status check_lengths(const Attributes& a, const Limits& limits, const Step& s) {
  int64_t longest_seq = 0, longest_kv = 0;
  for (int64_t b = 0; b < s.batch; ++b) {
    SequenceShape q = shape_of(s, b);
    if (q.start_pos < 0) return bad("start_pos", cat("start_pos[", b, "] is ", q.start_pos, "; it must be at least 0"));
    if (a.append && (q.kvlen < q.seqlen || q.kvlen - q.seqlen != q.start_pos))
      return bad("kvstarts", cat("sequence ", b, " has kvlen ", q.kvlen,
                                 "; with append it must be start_pos + seqlen = ", q.start_pos, " + ", q.seqlen));
    longest_seq = std::max(longest_seq, q.seqlen);
    longest_kv = std::max(longest_kv, q.kvlen);
  }
  if (s.max_seqlen < longest_seq)
    return bad("max_seqlen",
               cat("max_seqlen is ", s.max_seqlen, "; the longest sequence has ", longest_seq, " tokens"));
  if (s.max_kvlen < longest_kv)
    return bad("max_kvlen", cat("max_kvlen is ", s.max_kvlen, "; the longest sequence has ", longest_kv, " keys"));
  if (longest_kv > limits.max_kvlen)
    return bad("max_kvlen", cat("a sequence has ", longest_kv, " keys; this operator was made for ", limits.max_kvlen));
  return {};
}

// Slots [begin, end) of sequence b: every index entry they need is there and inside the cache.
class IndexCheck {
 public:
  IndexCheck(const Attributes& a, const Limits& limits, const Step& s, PageStarts starts)
      : a_(a), limits_(limits), s_(s), page_(a.page_size), starts_(starts) {}

  Status slots(int64_t b, int64_t begin, int64_t end) const {
    if (begin >= end) return {};
    switch (a_.index_mode) {
      case IndexMode::offset: return offset(b, end);
      case IndexMode::page_table: return pages(b, begin, end);
      case IndexMode::token_table: return tokens(b, begin, end);
    }
    return {};
  }

  int64_t physical(int64_t b, int64_t slot) const {
    return kvcache::physical_token({a_.index_mode, page_, s_.cachestarts, s_.max_pages}, s_.kvstarts, b, slot);
  }
  // How many slots from `slot` on are neighbours in the cache.
  int64_t run(int64_t slot, int64_t end) const {
    if (a_.index_mode == IndexMode::offset) return end - slot;
    if (a_.index_mode == IndexMode::token_table) return 1;
    return std::min(end - slot, page_.left(slot));
  }

 private:
  Status offset(int64_t b, int64_t end) const {
    int64_t start = s_.cachestarts[b];
    if (start < 0 || start > limits_.cache_tokens - end)
      return bad("cachestarts",
                 cat("cachestarts[", b, "] is ", start, "; with ", end, " tokens from there it must be ", "from 0 to ",
                     limits_.cache_tokens - end, ", as the cache holds ", limits_.cache_tokens));
    return {};
  }
  Status pages(int64_t b, int64_t begin, int64_t end) const {
    const int64_t last = page_.page(end - 1);
    if (last >= s_.max_pages)
      return bad("cachestarts", cat("sequence ", b, " needs ", last + 1, " pages of ", a_.page_size, " for ", end,
                                    " tokens; its row of cachestarts has ", s_.max_pages));
    for (int64_t p = page_.page(begin); p <= last; ++p) {
      int64_t entry = s_.cachestarts[b * s_.max_pages + p];
      int64_t used = std::min<int64_t>(a_.page_size, end - p * a_.page_size);
      if (entry < 0 || entry > limits_.cache_tokens - used)
        return bad("cachestarts", cat("cachestarts[", b, ", ", p, "] is ", entry, "; with ", used,
                                      " tokens from there ", "it must be from 0 to ", limits_.cache_tokens - used,
                                      ", as the cache holds ", limits_.cache_tokens));
      if (starts_ == PageStarts::multiples && entry % a_.page_size != 0)
        return unimplemented(cat("cachestarts[", b, ", ", p, "] is ", entry, "; this back end takes pages that begin ",
                                 "at multiples of page_size, which is ", a_.page_size, "; the cpu takes any"))
            .with_field("cachestarts");
    }
    return {};
  }
  Status tokens(int64_t b, int64_t begin, int64_t end) const {
    for (int64_t t = begin; t < end; ++t) {
      int64_t entry = s_.cachestarts[s_.kvstarts[b] + t];
      if (entry < 0 || entry >= limits_.cache_tokens)
        return bad("cachestarts", cat("cachestarts[", s_.kvstarts[b] + t, "] (token ", t, " of sequence ", b, ") is ",
                                      entry, "; it must be from 0 to ", limits_.cache_tokens - 1));
    }
    return {};
  }

  const Attributes& a_;
  const Limits& limits_;
  const Step& s_;
  const kvcache::PageSize page_;
  const PageStarts starts_;
};

Status check_indices(const Attributes& a, const Step& s, const IndexCheck& index) {
  for (int64_t b = 0; b < s.batch; ++b) {
    SequenceShape q = shape_of(s, b);
    if (a.cyclic_capacity > 0) {
      KVASIR_TRY(index.slots(b, 0, std::min<int64_t>(q.kvlen, a.cyclic_capacity)));
      continue;
    }
    // The first new token reaches furthest back; nothing before its window is read by any other.
    Visible first = q.seqlen > 0 ? visible_keys(a, q, 0) : Visible{0, 0, q.kvlen};
    KVASIR_TRY(index.slots(b, 0, first.sink_end));
    KVASIR_TRY(index.slots(b, first.lo, q.kvlen));
  }
  return {};
}

struct Write {
  int64_t begin, end, sequence;
  bool operator<(const Write& o) const { return begin < o.begin; }
};

Status check_writes(const Attributes& a, const Step& s, const IndexCheck& index) {
  std::vector<Write> writes;
  for (int64_t b = 0; b < s.batch; ++b) {
    SequenceShape q = shape_of(s, b);
    for (int64_t t = q.start_pos; t < q.kvlen;) {
      if (a.cyclic_capacity > 0) {
        if (survives(a, q, t)) {
          int64_t at = index.physical(b, cache_slot(a, t));
          writes.push_back({at, at + 1, b});
        }
        ++t;
      } else {
        int64_t at = index.physical(b, t), n = index.run(t, q.kvlen);
        writes.push_back({at, at + n, b});
        t += n;
      }
    }
  }
  std::sort(writes.begin(), writes.end());
  for (size_t i = 1; i < writes.size(); ++i)
    if (writes[i].begin < writes[i - 1].end)
      return bad("cachestarts", cat("sequences ", std::min(writes[i - 1].sequence, writes[i].sequence), " and ",
                                    std::max(writes[i - 1].sequence, writes[i].sequence), " both write token slot ",
                                    writes[i].begin, " of the cache"));
  return {};
}

Status check_beams(const Attributes& a, const Step& s) {
  if (s.cache_indirection == nullptr) return {};
  if (a.cyclic_capacity > 0)
    return bad("cache_indirection",
               "cache_indirection cannot be used with cyclic_capacity: beams share the prompt's slots");
  if (s.beam_width < 1 || s.batch % s.beam_width != 0)
    return bad("beam_width",
               cat("beam_width is ", s.beam_width, "; it must be at least 1 and divide the ", s.batch, " sequences"));
  for (int64_t b = 0; b < s.batch; ++b) {
    SequenceShape q = shape_of(s, b);
    if (q.seqlen > 1)
      return bad("cache_indirection", cat("sequence ", b, " is a beam with ", q.seqlen, " new tokens; beams have 1"));
    if (q.seqlen == 0) continue;
    const int32_t* row = s.cache_indirection + b * s.max_kvlen;
    int64_t group = b - b % s.beam_width;
    Visible v = visible_keys(a, q, 0);
    for (int64_t t = 0; t < v.hi; ++t) {
      if (t >= v.sink_end && t < v.lo) continue;
      if (row[t] < 0 || row[t] >= s.beam_width)
        return bad("cache_indirection", cat("cache_indirection of sequence ", b, " at token ", t, " is ", row[t],
                                            "; it must be from 0 to beam_width-1, which is ", s.beam_width - 1));
      SequenceShape other = shape_of(s, group + row[t]);
      if (t >= other.kvlen)
        return bad("cache_indirection", cat("cache_indirection of sequence ", b, " at token ", t, " names beam ",
                                            row[t], ", which has only ", other.kvlen, " tokens"));
    }
  }
  return {};
}

Status check_cascade(const Step& s) {
  if (s.shared_group == nullptr) return {};
  if (s.shared_len == nullptr) return bad("shared_len", "shared_len is absent though shared_group is given");
  for (int64_t b = 0; b < s.batch; ++b) {
    int32_t g = s.shared_group[b];
    if (g < -1 || g >= s.batch)
      return bad("shared_group", cat("shared_group[", b, "] is ", g, "; it must be from -1 to ", s.batch - 1));
    if (g >= 0 && (s.shared_len[g] < 0 || s.shared_len[g] > shape_of(s, b).kvlen))
      return bad("shared_len", cat("shared_len[", g, "] is ", s.shared_len[g], "; sequence ", b, " has ",
                                   shape_of(s, b).kvlen, " keys"));
  }
  return {};
}

}  // namespace

Status validate_step(const Attributes& a, const Limits& limits, const Step& s, PageStarts starts) {
  if (s.batch < 0 || s.batch > limits.max_batch)
    return bad("seqstarts", cat("the step has ", s.batch, " sequences; this operator was made for ", limits.max_batch));
  if (s.decoding_batches < 0 || s.decoding_batches > s.batch)
    return bad("decoding_batches", cat("decoding_batches is ", s.decoding_batches, "; it must be from 0 to ", s.batch));
  if (s.batch == 0) return {};
  if (!s.seqstarts || !s.kvstarts || !s.start_pos || !s.cachestarts)
    return bad("seqstarts", "seqstarts, kvstarts, start_pos and cachestarts must all be given");
  KVASIR_TRY(check_starts("seqstarts", s.seqstarts, s.batch));
  KVASIR_TRY(check_starts("kvstarts", s.kvstarts, s.batch));
  if (s.seqstarts[s.batch] > limits.max_tokens)
    return bad("seqstarts", cat("the step has ", s.seqstarts[s.batch], " new tokens; this operator was made for ",
                                limits.max_tokens));
  if (s.max_pages < 0 || (a.index_mode == IndexMode::page_table && s.max_pages > limits.max_pages))
    return bad("cachestarts",
               cat("cachestarts has rows of ", s.max_pages, " pages; this operator was made for ", limits.max_pages));
  KVASIR_TRY(check_lengths(a, limits, s));
  IndexCheck index(a, limits, s, starts);
  KVASIR_TRY(check_indices(a, s, index));
  if (a.append) KVASIR_TRY(check_writes(a, s, index));
  KVASIR_TRY(check_beams(a, s));
  return check_cascade(s);
}

}  // namespace kvasir::attention
