// How a network splits over ranks: parts of one process that compute each step together, each with its own heads,
// columns of the MLPs, experts, tokens of the vocabulary, and the cache of its heads.
//
// A sublayer begins with weights of which a rank has whole outputs (Shard::rows) and ends with one of which it has
// inputs (Shard::cols): what that gives is a partial sum, and the ranks add theirs up. Between them nobody waits.
#pragma once

#include <cstdint>
#include <vector>

#include "core/status.h"

namespace kvasir::model {

struct ModelConfig;
class Weights;

// [first, first + count) of what all ranks together have `all` of. Nothing at all: it is not split.
struct Share {
  int64_t first = 0, count = 0, all = 0;
  bool split() const { return all > 0; }
  int64_t whole(int64_t own) const { return split() ? all : own; }
  Share times(int64_t n) const { return {first * n, count * n, all * n}; }
};

struct RankPart {
  int32_t rank = 0, ranks = 1;
  Share heads, kv_heads, ffn, shared_ffn, experts, vocab;
  bool first() const { return rank == 0; }
  // Of ranks that have one key/value head together, the first counts it.
  bool counts_keys() const { return heads.first % (heads.all / kv_heads.all) == 0; }
};

constexpr int32_t kMostRanks = 64;

// The network each rank runs: the same, with fewer heads and columns. What cannot be split so is refused by its name.
// Key/value heads go to ranks whole, with their queries; where there are fewer of them than ranks, several have one,
// and share its queries. Columns split between blocks of the weights' types.
Result<std::vector<ModelConfig>> split_over_ranks(const ModelConfig& whole, const Weights& weights, int32_t ranks);

}  // namespace kvasir::model
