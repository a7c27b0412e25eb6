#include "attention/cpu/attend.h"

#include <cmath>
#include <cstring>

#include "attention/io.h"

namespace kvasir::attention::cpu {
namespace {

constexpr float kNone = -INFINITY;

// StreamingLLM: keys lie un-rotated; a key's position is its rank among the visible.
void rotate_ranks(const LayerCall& call, const Tile& tile, const Visible& v, float* keys) {
  const Rope& rope = call.a->rope;
  const int half = rope.rotary_dim / 2;
  const int64_t gap = v.lo - v.sink_end;
  for (int i = 0; i < half; ++i) {
    float* x = keys + (rope.style == RopeStyle::neox ? i : 2 * i) * kTile;
    float* y = keys + (rope.style == RopeStyle::neox ? i + half : 2 * i + 1) * kTile;
    for (int j = tile.begin; j < tile.end; ++j) {
      if (!tile.wanted(j)) continue;
      const int64_t t = tile.first + j, rank = t < v.sink_end ? t : t - gap;
      const float c = call.rank_angles[rank * rope.rotary_dim + 2 * i];
      const float s = call.rank_angles[rank * rope.rotary_dim + 2 * i + 1];
      const float x0 = x[j], y0 = y[j];
      x[j] = x0 * c - y0 * s;
      y[j] = y0 * c + x0 * s;
    }
  }
}

void rotate_query(const LayerCall& call, const Visible& v, int64_t token, float* q) {
  const Attributes& a = *call.a;
  if (a.rope.style == RopeStyle::none) return;
  const int64_t rank = v.hi - 1 - (v.lo - v.sink_end);
  rotate(a.rope,
         a.streaming_positions ? call.rank_angles + std::max<int64_t>(rank, 0) * a.rope.rotary_dim
                               : call.angles + token * a.rope.rotary_dim,
         q);
}

void load_queries(const LayerCall& call, const AttendItem& item, Scratch& s) {
  const Attributes& a = *call.a;
  const int group = a.num_heads / a.num_kv_heads;
  const int64_t token0 = call.held->step.seqstarts[item.sequence], padded = padded_dim(a.head_dim);
  for (int64_t i = item.token_begin, r = 0; i < item.token_end; ++i)
    for (int g = 0; g < group; ++g, ++r) {
      float* q = s.query + r * padded;
      std::fill(q + a.head_dim, q + padded, 0.0f);
      read_part(call, 0, token0 + i, item.kv_head * group + g, q, s.row.get());
      rotate_query(call, s.visible[size_t(i - item.token_begin)], token0 + i, q);
      if (a.fp8_query)
        for (int d = 0; d < a.head_dim; ++d) q[d] = as_fp8(q[d], call.tensors->q_scale);
    }
}

// Parameters of each row's softmax in this tile.
void set_rows(const LayerCall& call, const AttendItem& item, const Tile& tile, int64_t i0, int64_t i1, Scratch& s) {
  const Attributes& a = *call.a;
  const Tensors& t = *call.tensors;
  const int group = a.num_heads / a.num_kv_heads;
  const SequenceShape shape = call.held->shape(item.sequence);
  size_t r = 0;
  for (int64_t i = i0; i < i1; ++i) {
    const Visible& v = s.visible[size_t(i - item.token_begin)];
    auto inside = [&](int64_t j) { return int(std::clamp<int64_t>(j - tile.first, 0, kTile)); };
    for (int g = 0; g < group; ++g, ++r) {
      const int head = item.kv_head * group + g;
      SoftmaxRow& p = s.params[r];
      p = {inside(v.sink_end), inside(v.lo), inside(v.hi), 0.0f, 0.0f, nullptr};
      if (a.is_alibi) {
        p.slope = a.alibi_slopes[size_t(head)];
        p.offset = float(tile.first - (shape.kvlen - shape.seqlen + i));
      }
      p.mask = call.relative_bias->tile(head, tile.first - (shape.kvlen - shape.seqlen + i));
      if (t.attn_mask) {
        float* mask = s.mask + int64_t(r) * kTile;
        const int64_t row = call.held->step.seqstarts[item.sequence] + i;
        const int64_t at = head * t.mask_head_stride + row * t.mask_row_stride +
                           call.held->step.kvstarts[item.sequence] + tile.first + tile.begin;
        std::memset(mask, 0, kTile * sizeof(float));
        call.kernels->to_f32(static_cast<const uint8_t*>(t.attn_mask) + dtype_bytes(a.io, at), a.io,
                             tile.end - tile.begin, mask + tile.begin);
        for (int j = tile.begin; p.mask && j < tile.end; ++j) mask[j] += p.mask[j];
        p.mask = mask;
      }
    }
  }
}

void write_row(const LayerCall& call, int64_t token, int64_t head, float m, float l, float* o, float* lse) {
  const Attributes& a = *call.a;
  float sum = l, fix = 1.0f, top = m;
  if (m > kNone && call.tensors->sink_logits) {
    const float sink = call.tensors->sink_logits[head];
    top = std::max(m, sink);
    fix = std::exp(m - top);
    sum = l * fix + std::exp(sink - top);
  }
  // Adding 0 makes -0 into +0: which zero it was may depend on keys that weigh nothing.
  const float inverse = m > kNone ? fix / sum : 0.0f;
  for (int d = 0; d < a.head_dim; ++d) o[d] = m > kNone ? o[d] * inverse + 0.0f : 0.0f;
  const int64_t first = (token * a.num_heads + head) * a.head_dim;
  if (a.out == DType::f8_e4m3)
    write_elements(o, a.out, first, a.head_dim, a.out_scale, call.tensors->output);
  else
    call.kernels->from_f32(o, a.out, a.head_dim,
                           static_cast<uint8_t*>(call.tensors->output) + dtype_bytes(a.out, first));
  if (lse) lse[token * a.num_heads + head] = m > kNone ? top + std::log(sum) : kNone;
}

float score_scale(const Attributes& a) { return 1.0f / (a.q_scaling * std::sqrt(float(a.head_dim))); }

void attend_tile(const LayerCall& call, const AttendItem& item, Tile& tile, Prefetcher& ahead, Scratch& s) {
  const Attributes& a = *call.a;
  const Kernels& k = *call.kernels;
  const int group = a.num_heads / a.num_kv_heads, padded = int(padded_dim(a.head_dim));
  const int64_t i0 = tile.token_begin, i1 = tile.token_end, r0 = (i0 - item.token_begin) * group;
  const int rows = int(i1 - i0) * group;
  constexpr int kStrip = 24;  // rows whose scores stay in L1 between the three loops
  if (rows != s.rows) s.rows = rows, s.stops = k.stops(rows, a.head_dim);
  ahead.stops = s.stops;
  ahead.reach = k.reach(rows, tile.keys);

  const bool packed = rows > kFewRows || (tile.keys.grouped && tile.keys.group < kLeastReadGroup);
  const bool packed_keys = packed || a.streaming_positions;
  if (packed_keys) k.pack_keys(tile.keys, s.keys.get(), &ahead);
  if (a.streaming_positions) rotate_ranks(call, tile, s.visible[size_t(i0 - item.token_begin)], s.keys.get());
  set_rows(call, item, tile, i0, i1, s);
  if (packed) k.pack_values(tile.values, s.values.get(), padded, &ahead);

  const float scale = score_scale(a);
  for (int r = 0; r < rows; r += kStrip) {
    const int n = std::min(kStrip, rows - r);
    const int64_t at = r0 + r;
    if (packed_keys)
      k.scores(s.query + at * padded, n, padded, a.head_dim, s.keys.get(), tile.begin, tile.end, s.scores.get(),
               &ahead);
    else
      k.scores_rows(s.query + at * padded, n, padded, tile.keys, s.scores.get(), &ahead);
    k.softmax(s.scores.get(), n, s.params.data() + r, scale, a.softcap, s.m + at, s.l + at, s.fix.get());
    if (packed)
      k.accumulate(s.scores.get(), n, s.values.get(), padded, tile.begin, tile.end, s.fix.get(), s.split + at * padded,
                   padded, &ahead);
    else
      k.accumulate_rows(s.scores.get(), n, tile.values, s.fix.get(), s.split + at * padded, padded, &ahead);
  }
}

void attend_with_tile_kernel(const LayerCall& call, const TileKernel& tile_kernel, const AttendItem& item, Tile& tile,
                             const Tile* after, Prefetcher& ahead, Scratch& s) {
  const Attributes& a = *call.a;
  const int group = a.num_heads / a.num_kv_heads, padded = int(padded_dim(a.head_dim));
  const int64_t i0 = tile.token_begin, i1 = tile.token_end, r0 = (i0 - item.token_begin) * group;
  const int rows = int(i1 - i0) * group;
  uint8_t* memory = reinterpret_cast<uint8_t*>(s.tile_scratch.get());
  ahead.stops = tile_kernel.stops(a.head_dim);
  ahead.reach = tile_kernel.reach ? tile_kernel.reach(tile.keys) : Reach::next;
  set_rows(call, item, tile, i0, i1, s);
  tile_kernel.scores(int(r0), rows, tile.keys, tile.values, s.scores.get(), memory, &ahead);
  call.kernels->softmax(s.scores.get(), rows, s.params.data(), score_scale(a), a.softcap, s.m + r0, s.l + r0,
                        s.fix.get());
  tile_kernel.accumulate(s.scores.get(), rows, tile.values, after ? &after->keys : nullptr, s.fix.get(),
                         s.split + r0 * padded, padded, memory, &ahead);
}

// The tiles of an item in order, the one at work and as many of those after it as are prefetched.
class Tiles {
 public:
  Tiles(const LayerCall& call, const AttendItem& item, Scratch& s)
      : job_(call), item_(item), s_(s), most_(call.fresh ? 1 : kTilesKnown), from_(int64_t(item.split_begin) * kSplit) {
    look();
  }
  Tile* known(int i) { return i < count_ ? &s_.tiles[(now_ + i) % kTilesKnown] : nullptr; }
  void pass() {
    now_ = (now_ + 1) % kTilesKnown;
    --count_;
    look();
  }
  // What is to be prefetched during the first of them. (Made anew each time, all of it would be cleared first.)
  void start(Prefetcher* ahead) {
    over(known(0), known(1), &ahead->soon);
    over(known(1), nullptr, &ahead->next);
    over(known(2), nullptr, &ahead->later);
    skip(kSoon, &ahead->soon);
    const Tile* after = known(1);
    ahead->bursts = after ? (after->lines + kBurst - 1) / kBurst : 0;
    ahead->due = -1;
  }

 private:
  // So many lines before it is read one comes into L1: 8 KB, a sixth of it.
  static constexpr int64_t kSoon = 128;

  static void over(const Tile* tile, const Tile* then, LineWalk* walk) {
    walk->next = tile ? tile->memory.data() : nullptr, walk->last = tile ? walk->next + tile->pieces : nullptr;
    walk->then = then ? then->memory.data() : nullptr, walk->then_last = then ? walk->then + then->pieces : nullptr;
    walk->row.rows = 0;
    walk->line = walk->end = nullptr;
  }
  static void skip(int64_t lines, LineWalk* walk) {
    for (; walk->next != walk->last && lines > 0; ++walk->next) {
      Piece& p = walk->row = *walk->next;
      const int64_t each = (p.bytes + kLine - 1) / kLine, rows = lines < each ? 0 : std::min(p.rows, lines / each);
      lines -= rows * each, p.rows -= rows, p.at += rows * p.step;
      if (p.rows == 1) p.at += lines * kLine, p.bytes -= lines * kLine;
      if (p.rows > 0) lines = 0;
    }
  }
  void look() {
    while (more_ && count_ < most_) {
      Tile* tile = &s_.tiles[(now_ + count_) % kTilesKnown];
      more_ = next_tile(job_, item_, from_, s_, tile);
      if (!more_) return;
      from_ = tile->first + kTile;
      ++count_;
    }
  }

  const LayerCall& job_;
  const AttendItem& item_;
  Scratch& s_;
  const int most_;  // of a cyclic cache `old` holds the rows of one only
  int64_t from_;
  bool more_ = true;
  int now_ = 0, count_ = 0;
};

void begin_split(int64_t rows, int64_t padded, Scratch& s) {
  std::fill_n(s.m.get(), rows, kNone);
  std::fill_n(s.l.get(), rows, 0.0f);
  std::memset(s.split.get(), 0, size_t(rows * padded) * sizeof(float));
}

void end_split(const LayerCall& call, const AttendItem& item, int64_t split, int64_t rows, int64_t padded, Scratch& s) {
  for (int64_t r = 0; r < rows; ++r) {
    if (item.partial < 0) {
      call.kernels->merge(s.M + r, s.L + r, s.total + r * padded, *(s.m + r), *(s.l + r), s.split + r * padded,
                          int(padded));
    } else {
      float* out = call.partials + (item.partial + (split - item.split_begin) * rows + r) * (padded + kPartialHead);
      out[0] = *(s.m + r);
      out[1] = *(s.l + r);
      std::memcpy(out + kPartialHead, s.split + r * padded, size_t(padded) * sizeof(float));
    }
  }
}

}  // namespace

RelativeBias::RelativeBias(const Attributes& a) {
  if (a.relative_bias.empty()) return;
  const int64_t given = int64_t(a.relative_bias.size()) / a.num_heads;
  reach_ = given / 2, each_ = given + 2 * kTile;
  values_.reserve(size_t(each_ * a.num_heads));
  for (int64_t h = 0; h < a.num_heads; ++h)
    for (int64_t i = -kTile; i < given + kTile; ++i)
      values_.push_back(a.relative_bias[size_t(h * given + std::clamp<int64_t>(i, 0, given - 1))]);
}

Scratch::Scratch(const Attributes& a, int rows, int64_t tile_scratch_bytes)
    : keys(int64_t(a.head_dim) * kTile),
      values(kTile * padded_dim(a.head_dim)),
      query(rows * padded_dim(a.head_dim)),
      scores(int64_t(rows) * kTile),
      mask(int64_t(rows) * kTile),
      split(rows * padded_dim(a.head_dim)),
      total(rows * padded_dim(a.head_dim)),
      m(rows),
      l(rows),
      M(rows),
      L(rows),
      fix(rows),
      row(padded_dim(a.head_dim)),
      visible(size_t(rows)),
      params(size_t(rows)) {
  for (Tile& tile : tiles) tile.memory.resize(4 * kTile);
  if (tile_scratch_bytes > 0) tile_scratch = Floats(tile_scratch_bytes / 4);
  if (a.cyclic_capacity > 0)
    for (Floats& rows_of : old) rows_of = Floats(kTile * padded_dim(a.head_dim));
}

void rotate(const Rope& rope, const float* angles, float* row) {
  const int half = rope.rotary_dim / 2;
  const int step = rope.style == RopeStyle::neox ? 1 : 2, pair = rope.style == RopeStyle::neox ? half : 1;
  for (int i = 0; i < half; ++i) {
    float &x = row[i * step], &y = row[i * step + pair];
    const float c = angles[2 * i], s = angles[2 * i + 1], x0 = x, y0 = y;
    x = x0 * c - y0 * s;
    y = y0 * c + x0 * s;
  }
}

void read_part(const LayerCall& call, int which, int64_t token, int64_t head, float* out, float* spare) {
  const Attributes& a = *call.a;
  const InputPart part = InputPart(which);
  const int64_t element = part_element(a, part, token, head);
  const void* from = part_tensor(a, *call.tensors, part);
  if (a.io == DType::f8_e4m3)
    read_elements(from, a.io, element, a.head_dim, part_scale(a, *call.tensors, part), out);
  else
    call.kernels->to_f32(static_cast<const uint8_t*>(from) + dtype_bytes(a.io, element), a.io, a.head_dim, out);
  if (!call.tensors->qkv_bias) return;
  read_elements(call.tensors->qkv_bias, a.io, part_head(a, part, head) * a.head_dim, a.head_dim, 1.0f, spare);
  for (int d = 0; d < a.head_dim; ++d) out[d] += spare[d];
}

void attend(const LayerCall& call, const AttendItem& item, Scratch& s) {
  const Attributes& a = *call.a;
  const int group = a.num_heads / a.num_kv_heads;
  const int64_t tokens = item.token_end - item.token_begin, rows = tokens * group, padded = padded_dim(a.head_dim);
  const SequenceShape shape = call.held->shape(item.sequence);
  for (int64_t i = 0; i < tokens; ++i) s.visible[size_t(i)] = visible_keys(a, shape, item.token_begin + i);
  load_queries(call, item, s);
  const TileKernel* tile_kernel = call.tile_kernel;
  if (tile_kernel && tile_kernel->of_few && rows <= tile_kernel->few && tile_kernel->of_few->takes(call.kind))
    tile_kernel = tile_kernel->of_few;
  if (tile_kernel)
    tile_kernel->begin(s.query.get(), int(rows), int(padded), call.kind,
                       reinterpret_cast<uint8_t*>(s.tile_scratch.get()));

  std::fill_n(s.M.get(), rows, kNone);
  std::fill_n(s.L.get(), rows, 0.0f);
  // While one tile is worked on, the rows of the next are on their way from memory.
  Tiles tiles(call, item, s);
  int64_t split = item.split_begin;
  begin_split(rows, padded, s);
  Prefetcher ahead;
  for (; Tile* tile = tiles.known(0); tiles.pass()) {
    tiles.start(&ahead);
    for (; split < tile->first / kSplit; ++split) {
      end_split(call, item, split, rows, padded, s);
      begin_split(rows, padded, s);
    }
    if (tile_kernel)
      attend_with_tile_kernel(call, *tile_kernel, item, *tile, tiles.known(1), ahead, s);
    else
      attend_tile(call, item, *tile, ahead, s);
  }
  for (; split < item.split_end; ++split) {
    end_split(call, item, split, rows, padded, s);
    begin_split(rows, padded, s);
  }
  if (tile_kernel) tile_kernel->end();
  if (item.partial >= 0) return;
  const int64_t token0 = call.held->step.seqstarts[item.sequence];
  for (int64_t r = 0; r < rows; ++r)
    write_row(call, token0 + item.token_begin + r / group, item.kv_head * group + r % group, *(s.M + r), *(s.L + r),
              s.total + r * padded, a.return_lse ? call.tensors->lse : nullptr);
}

void merge_splits(const LayerCall& call, const Merge& merge, Scratch& s) {
  const Attributes& a = *call.a;
  const int group = a.num_heads / a.num_kv_heads;
  const int64_t rows = (merge.token_end - merge.token_begin) * group, padded = padded_dim(a.head_dim);
  const int64_t token0 = call.held->step.seqstarts[merge.sequence] + merge.token_begin;
  for (int64_t r = 0; r < rows; ++r) {
    float m = kNone, l = 0;
    for (int64_t split = 0; split < merge.splits; ++split) {
      const float* part = call.partials + (merge.partial + split * rows + r) * (padded + kPartialHead);
      call.kernels->merge(&m, &l, s.total.get(), part[0], part[1], part + kPartialHead, int(padded));
    }
    write_row(call, token0 + r / group, merge.kv_head * group + r % group, m, l, s.total.get(),
              a.return_lse ? call.tensors->lse : nullptr);
  }
}

}  // namespace kvasir::attention::cpu
