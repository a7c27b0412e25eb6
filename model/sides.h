// A packed step of an encoder-decoder as its two networks see it: of each sequence the encoder's rows, the decoder's
// rows, and for each of these what the encoder has left. All lie in the sequence's own pages, the source's tokens in
// front.
#pragma once

#include <vector>

#include "kvcache/view.h"
#include "model/batch.h"
#include "model/ops.h"

namespace kvasir::model {

class Sides {
 public:
  // A source is computed whole, since its tokens see one another.
  void take(const Batch& batch, const std::vector<int32_t>& tokens, kvcache::IndexMode mode, int32_t page_size);
  // Tokens are found by kvcache::IndexMode::token_table: a target begins anywhere in a page. Positions are its own.
  const Batch& of(Side side) const { return parts_[size_t(side)]; }

 private:
  Batch parts_[3];
};

}  // namespace kvasir::model
