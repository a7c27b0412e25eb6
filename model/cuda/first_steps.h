// Steps that are taken before anybody waits for one: what is made when it is first used is made then.
#pragma once

#include <numeric>

#include "kvcache/view.h"
#include "model/batch.h"

namespace kvasir::model::cuda {

// One prompt of `tokens` zeros in the first pages of each of `groups` caches, all of whose logits are wanted.
inline Batch first_pages(int64_t tokens, int64_t page_size, kvcache::IndexMode mode, size_t groups) {
  Batch b;
  b.tokens.resize(size_t(tokens));
  b.positions.resize(size_t(tokens));
  std::iota(b.positions.begin(), b.positions.end(), 0);
  b.logit_rows = b.positions;
  b.seqstarts = b.kvstarts = {0, tokens};
  b.start_pos = {0};
  b.max_seqlen = b.max_kvlen = tokens;
  b.max_pages = (tokens + page_size - 1) / page_size;
  const bool table = mode == kvcache::IndexMode::page_table;
  const int64_t count = table ? b.max_pages : mode == kvcache::IndexMode::offset ? 1 : tokens;
  for (int64_t i = 0; i < count; ++i) b.cachestarts.push_back(table ? i * page_size : i);
  b.more_cachestarts.assign(groups - 1, b.cachestarts);
  return b;
}

// `count` sequences of one token, each in a page of its own.
inline Batch first_decodes(int64_t count, int64_t page_size, kvcache::IndexMode mode, size_t groups) {
  Batch b = first_pages(1, page_size, mode, groups);
  for (int64_t i = 1; i < count; ++i) {
    b.tokens.push_back(0), b.positions.push_back(0), b.start_pos.push_back(0);
    b.logit_rows.push_back(int32_t(i));
    b.seqstarts.push_back(i + 1), b.kvstarts.push_back(i + 1);
    b.cachestarts.push_back(i * page_size);
  }
  b.decoding_batches = count;
  b.more_cachestarts.assign(groups - 1, b.cachestarts);
  return b;
}

}  // namespace kvasir::model::cuda
