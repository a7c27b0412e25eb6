#include "model/ranks.h"

#include <algorithm>

#include "attention/rules.h"
#include "core/cat.h"
#include "model/config.h"
#include "model/formats/weights.h"

namespace kvasir::model {
namespace {

Share share_of(int64_t all, int64_t unit, int64_t rank, int64_t ranks) {
  const int64_t units = all / unit, first = units * rank / ranks * unit;
  return {first, (rank + 1 == ranks ? all : units * (rank + 1) / ranks * unit) - first, all};
}

// The widest of the weights' blocks: a column split between those falls inside none.
int64_t widest_block(const ModelConfig& config, const Weights& weights) {
  int64_t out = 1;
  for (const HostTensor& t : weights.tensors()) {
    out = std::max<int64_t>(out, part_of_others(t.type) ? 32 : type_info(t.type)->block);
  }
  for (uint32_t type = 0; type < 64; ++type)  // a dummy's tensors are not there yet
    if (const TypeInfo* info = type_info(WeightType(type)); info && info->name == config.quantization)
      out = std::max<int64_t>(out, info->block);
  return out;
}

// Kernels like whole groups of rows, where there are enough of them.
int64_t unit_of(int64_t all, int64_t block, int64_t ranks) {
  for (int64_t unit : {int64_t(32), int64_t(16), int64_t(8)})
    if (unit >= block && all % unit == 0 && all / unit >= ranks) return unit;
  return block;
}

Status refuse(const std::string& why) { return invalid_argument(why).with_field("ranks"); }

Status splits(const ModelConfig& c, int64_t block, int32_t ranks) {
  const std::string n = cat("ranks is ", ranks, "; ");
  if (ranks > kMostRanks) return refuse(cat(n, "at most ", kMostRanks, " are supported"));
  if (c.encoder) return refuse(n + "encoders are not split over ranks: 1");
  if (c.encoder_layers > 0) return refuse(n + "encoder-decoders are not split over ranks: 1");
  if (c.latent.on()) return refuse(n + "models with latent attention are not split over ranks: 1");
  if (c.state_bytes() > 0) return refuse(n + "models with layers of linear attention are not split over ranks: 1");
  if (c.sizes_by_layer) return refuse(n + "models whose layers differ in their sizes are not split over ranks: 1");
  struct Piece {
    const char* name;
    int64_t pieces;
  };
  const bool dense = c.experts.routing.experts == 0 ||
                     std::find(c.experts.dense.begin(), c.experts.dense.end(), true) != c.experts.dense.end();
  for (const Piece& p : {Piece{"heads", int64_t(c.kv_heads) * (c.heads / c.kv_heads)},
                         Piece{"blocks of columns in its MLPs", dense ? c.ffn / block : ranks},
                         Piece{"blocks of columns in its shared experts",
                               c.experts.shared_ffn > 0 ? c.experts.shared_ffn / block : ranks},
                         Piece{"experts", c.experts.routing.experts > 0 ? c.experts.routing.experts : ranks},
                         Piece{"tokens in its vocabulary", c.vocab}})
    if (p.pieces < ranks)
      return refuse(cat(n, "the model has ", p.pieces, ' ', p.name, ", and each rank needs one: at most ", p.pieces));
  // The queries of a key/value head, where several ranks have it.
  const int64_t sharing = (ranks + c.kv_heads - 1) / c.kv_heads, queries = c.heads / c.kv_heads;
  if (ranks > c.kv_heads && sharing > queries)
    return refuse(cat(n, "the model has ", queries, " queries a key/value head, and ", sharing,
                      " ranks would share them: at most ", c.kv_heads * queries));
  return {};
}

RankPart part_of(const ModelConfig& c, int64_t block, int32_t rank, int32_t ranks) {
  RankPart p{.rank = rank, .ranks = ranks};
  const int64_t kv = c.kv_heads, queries = c.heads / kv;
  if (ranks <= kv) {
    p.kv_heads = share_of(kv, 1, rank, ranks);
    p.heads = p.kv_heads.times(queries);
  } else {
    int64_t head = 0;
    while (ranks * (head + 1) / kv <= rank) ++head;
    const int64_t first = ranks * head / kv, sharing = ranks * (head + 1) / kv - first;
    p.kv_heads = {head, 1, kv};
    p.heads = share_of(queries, 1, rank - first, sharing);
    p.heads = {head * queries + p.heads.first, p.heads.count, c.heads};
  }
  p.ffn = share_of(c.ffn, unit_of(c.ffn, block, ranks), rank, ranks);
  if (const int64_t shared = c.experts.shared_ffn; shared > 0)
    p.shared_ffn = share_of(shared, unit_of(shared, block, ranks), rank, ranks);
  if (const int64_t experts = c.experts.routing.experts; experts > 0) p.experts = share_of(experts, 1, rank, ranks);
  p.vocab = share_of(c.vocab, unit_of(c.vocab, 1, ranks), rank, ranks);
  return p;
}

}  // namespace

Result<std::vector<ModelConfig>> split_over_ranks(const ModelConfig& whole, const Weights& weights, int32_t ranks) {
  if (ranks <= 1) return std::vector<ModelConfig>{whole};
  const int64_t block = widest_block(whole, weights);
  KVASIR_TRY(splits(whole, block, ranks));
  std::vector<float> slopes = whole.alibi_slopes;
  if (whole.alibi && slopes.empty()) slopes = attention::default_alibi_slopes(whole.heads);
  std::vector<ModelConfig> out;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    ModelConfig& c = out.emplace_back(whole);
    const RankPart& p = c.part = part_of(whole, block, rank, ranks);
    c.heads = int32_t(p.heads.count), c.kv_heads = int32_t(p.kv_heads.count);
    c.ffn = int32_t(p.ffn.count), c.experts.shared_ffn = int32_t(p.shared_ffn.count);
    c.vocab = int32_t(p.vocab.count);
    if (whole.alibi)
      c.alibi_slopes.assign(slopes.begin() + p.heads.first, slopes.begin() + p.heads.first + p.heads.count);
  }
  return out;
}

}  // namespace kvasir::model
