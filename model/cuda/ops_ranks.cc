// What of a step crosses ranks: sums of the products of which each rank has a part of the inputs, the embedding, of
// which each has some tokens, and the logits.
#include "core/check.h"
#include "model/cuda/kernels.h"
#include "model/cuda/ops.h"

namespace kvasir::model::cuda {

Status CudaOps::make_partials(int64_t cols) {
  if (partials_[0].id >= 0) {
    KVASIR_CHECK(partials_[0].cols == cols, "sums of ", cols, " and ", partials_[0].cols, " columns");
    return {};
  }
  for (Buffer& b : partials_) {
    auto room = std::make_unique<Room>();
    room->half = true;  // and never anything else
    KVASIR_TRY(room->half_data.allocate(size_t(options_.max_tokens * cols) * 2));
    buffers_.push_back(std::move(room));
    b = {int32_t(buffers_.size() - 1), cols};
  }
  KVASIR_TRY(own_ids_.allocate(size_t(options_.max_tokens) * sizeof(int32_t)));
  KVASIR_TRY(squares_.allocate(size_t(options_.max_tokens) * 2 * sizeof(float)));
  options_.link->publish_squares(options_.part.rank, squares_.as<float>());
  options_.link->publish_partials(options_.part.rank, room(partials_[0]).half_data.get(),
                                  room(partials_[1]).half_data.get());
  return {};
}

Status CudaOps::summed(Buffer in, Matrix weight, bool add, Buffer out) {
  KVASIR_TRY(product(in, weight, Form::bf16, partial()));
  return sum_partials(add, out);
}

// Until ranks wait for one another, as if there were no others.
LinkView CudaOps::link_view() const {
  LinkView v = options_.link->view(options_.part.rank);
  if (options_.link->joined()) return v;
  for (auto& turn : v.partials) turn[0] = turn[v.rank];
  v.barriers[0] = v.barriers[v.rank], v.logits[0] = v.logits[v.rank], v.squares[0] = v.squares[v.rank];
  v.first[0] = v.first[v.rank], v.count[0] = v.count[v.rank];
  v.rank = 0, v.ranks = 1;
  return v;
}

// Two buffers by turns: a rank that has come to a sum has passed the one before, and reads nothing of it any more. A
// step begins with the first again, so that graphs of steps that are captured once fit behind one another.
Status CudaOps::sum_partials(bool add, Buffer out) {
  float* to = add ? data(out) : write(out);
  KVASIR_CHECK(!room(out).half, "what is added to is float32");
  written(out, false);
  // Two shots round once more, so how often must not depend on how many rows there are.
  launch_sum(link_view(), turn_, add, to, rows(out) * out.cols, stream_, 0,
             options_.batch_invariant ? Shots::one : Shots::fitting);
  turn_ ^= 1, sum_is_last_ = true;
  return launched("sum over ranks");
}

Status CudaOps::add_linear_norm(Buffer in, Matrix weight, Buffer out, Vector norm, float eps, Buffer normed) {
  if (!crosses(weight) && leaves_sums(in, weight) && norms_to_bytes(normed))
    return add_sums_norm(in, weight, out, norm, eps, normed);
  if (!crosses(weight) || options_.batch_invariant || makes_bytes(normed) || !sum_norm_takes(out.cols) ||
      two_shots_win(options_.link->ranks(), rows(out) * out.cols))
    return Ops::add_linear_norm(in, weight, out, norm, eps, normed);
  KVASIR_TRY(product(in, weight, Form::bf16, partial()));
  KVASIR_CHECK(!room(out).half, "what is added to is float32");
  written(out, false);
  launch_sum_norm(link_view(), turn_, data(out), vector(norm), eps, write_half(normed), rows(out), out.cols, stream_);
  turn_ ^= 1, sum_is_last_ = true;
  return launched("sum over ranks and norm");
}

Status CudaOps::qk_norm_over_ranks(Buffer qkv, int64_t q_cols, Vector q, int64_t kv_cols, Vector k, float eps) {
  const RankPart& part = options_.part;
  const int64_t head = q_cols / part.heads.count;
  launch_qk_norm_over_ranks(link_view(),
                            {.x = data(qkv),
                             .stride = qkv.cols,
                             .q_cols = q_cols,
                             .kv_cols = kv_cols,
                             .q_all = head * part.heads.all,
                             .kv_all = head * part.kv_heads.all,
                             .counts_keys = part.counts_keys(),
                             .q = vector(q),
                             .k = vector(k),
                             .eps = eps},
                            rows(qkv), stream_);
  return launched("qk_norm over ranks");
}

Status CudaOps::embed_own(const Loaded& w, float scale, Buffer out) {
  const auto *ids = ids_[slot_].as<int32_t>(), *before = drawn_[slot_ ^ 1].as<int32_t>();
  const Share& own = options_.part.vocab;
  launch_own_tokens(ids, before, own, own_ids_.as<int32_t>(), tokens_, stream_);
  KVASIR_TRY(embed_rows(w, own_ids_.as<int32_t>(), nullptr, scale, out));
  launch_own_rows(ids, before, own, read(out), write_half(partial()), tokens_, w.cols, stream_);
  KVASIR_TRY(launched("embed"));
  return sum_partials(false, out);
}

Result<Buffer> CudaOps::gather(Buffer logits) {
  if (!options_.link || options_.link->ranks() == 1) return logits;
  KVASIR_CHECK(read(logits) == options_.link->view(options_.part.rank).logits[options_.part.rank],
               "logits that no other rank knows of");
  launch_gather(link_view(), write(whole_logits_), logit_rows_, whole_logits_.cols, stream_);
  sum_is_last_ = false;
  KVASIR_TRY(launched("gathering logits"));
  return whole_logits_;
}

// The next step writes the first buffer of sums, which others may still read where nothing has crossed ranks since.
Status CudaOps::end() {
  if (sum_is_last_ && options_.link->joined()) {
    launch_barrier(options_.link->view(options_.part.rank), stream_);
    KVASIR_TRY(launched("barrier"));
  }
  return adapters_.end(stream_);
}

}  // namespace kvasir::model::cuda
