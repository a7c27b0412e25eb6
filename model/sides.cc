#include "model/sides.h"

#include <algorithm>

#include "core/check.h"

namespace kvasir::model {
namespace {

void clear(Batch& b) {
  b.tokens.clear();
  b.positions.clear();
  b.seqstarts.assign(1, 0);
  b.kvstarts.assign(1, 0);
  b.start_pos.clear();
  b.cachestarts.clear();
  b.logit_rows.clear();
  b.decoding_batches = b.max_seqlen = b.max_kvlen = 0;
}

// The next sequence: `rows` of it from `start` on, of `kvlen` tokens, the first of which is token `first` of `all`'s
// b-th.
void add(const Batch& all, int64_t b, const kvcache::CacheIndex& index, int64_t start, int64_t rows, int64_t kvlen,
         int64_t first, Batch& to) {
  for (int64_t t = start; t < start + rows; ++t) to.positions.push_back(int32_t(t));
  for (int64_t t = 0; t < kvlen; ++t)
    to.cachestarts.push_back(kvcache::physical_token(index, all.kvstarts.data(), b, first + t));
  to.start_pos.push_back(start);
  to.seqstarts.push_back(to.seqstarts.back() + rows);
  to.kvstarts.push_back(to.kvstarts.back() + kvlen);
  to.max_seqlen = std::max(to.max_seqlen, rows);
  to.max_kvlen = std::max(to.max_kvlen, kvlen);
}

}  // namespace

void Sides::take(const Batch& batch, const std::vector<int32_t>& tokens, kvcache::IndexMode mode, int32_t page_size) {
  for (Batch& part : parts_) clear(part);
  Batch &source = parts_[size_t(Side::source)], &target = parts_[size_t(Side::target)],
        &cross = parts_[size_t(Side::cross)];
  const kvcache::CacheIndex index{mode, page_size, batch.cachestarts.data(), batch.max_pages};
  size_t logits = 0, drawn = batch.logit_rows.size();
  for (int64_t b = 0; b < batch.size(); ++b) {
    const int64_t row = batch.seqstarts[size_t(b)], rows = batch.seqstarts[size_t(b) + 1] - row;
    const int64_t start = batch.start_pos[size_t(b)], length = batch.sources[size_t(b)];
    const int64_t encoded = std::clamp<int64_t>(length - start, 0, rows), own = rows - encoded;
    KVASIR_CHECK(encoded == 0 || (start == 0 && encoded == length), "sequence ", b, " of an encoder-decoder has rows ",
                 start, " to ", start + rows, " of a source of ", length);
    const auto at = tokens.begin() + row;
    if (encoded > 0) {
      source.tokens.insert(source.tokens.end(), at, at + encoded);
      add(batch, b, index, 0, encoded, length, 0, source);
    }
    const int64_t begin = std::max(start, length) - length;
    for (; logits < drawn && batch.logit_rows[logits] < row + rows; ++logits) {
      const int64_t of = batch.logit_rows[logits] - row - encoded;
      KVASIR_CHECK(of >= 0, "logits of token ", of + encoded, " of a source of ", length);
      target.logit_rows.push_back(int32_t(target.seqstarts.back() + of));
    }
    target.tokens.insert(target.tokens.end(), at + encoded, at + rows);
    add(batch, b, index, begin, own, own > 0 ? begin + own : 0, length, target);
    add(batch, b, index, 0, own, own > 0 ? length : 0, 0, cross);
  }
  target.decoding_batches = cross.decoding_batches = batch.decoding_batches;
}

}  // namespace kvasir::model
