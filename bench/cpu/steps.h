// Steps as the benchmarks of a model make them: sequences that own their pages, greedy draws.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "model/runner.h"

namespace kvasir::bench {

constexpr int kPage = 16;
inline int64_t pages(int64_t tokens) { return (tokens + kPage - 1) / kPage; }

// `count` tokens of a sequence behind its first `begin`; it owns the pages of `room` tokens, sequence by sequence.
inline void add(model::Batch& b, int64_t sequence, int64_t begin, int64_t count, int64_t room, int32_t token) {
  if (b.seqstarts.empty()) b.seqstarts = {0}, b.kvstarts = {0};
  for (int64_t i = 0; i < count; ++i) {
    b.tokens.push_back(token + int32_t((i * 37) % 100));
    b.positions.push_back(int32_t(begin + i));
  }
  b.seqstarts.push_back(int64_t(b.tokens.size()));
  b.kvstarts.push_back(b.kvstarts.back() + begin + count);
  b.start_pos.push_back(begin);
  b.states.push_back(int32_t(sequence));  // of models that have them
  b.max_pages = pages(room);
  for (int64_t p = 0; p < b.max_pages; ++p) b.cachestarts.push_back((sequence * b.max_pages + p) * kPage);
  b.decoding_batches += count == 1;
  b.max_seqlen = std::max(b.max_seqlen, count);
  b.max_kvlen = std::max(b.max_kvlen, begin + count);
  b.logit_rows.push_back(int32_t(b.tokens.size()) - 1);
}

// Ends the program where it fails.
inline void run(model::Runner& runner, const model::Batch& b) {
  model::SamplingParams greedy;
  greedy.temperature = 0;
  std::vector<model::SampleRow> rows(b.logit_rows.size());
  for (model::SampleRow& r : rows) r.params = &greedy;
  Status s = runner.launch(b, rows);
  if (s.ok()) s = runner.wait().status();
  if (!s.ok()) std::fprintf(stderr, "%s\n", s.to_string().c_str()), std::exit(1);
}

}  // namespace kvasir::bench
