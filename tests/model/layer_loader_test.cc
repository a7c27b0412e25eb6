// What a layer's tensors become on their way to a device, where it takes elements of E4M3 with a scale a row.
#include "model/arch/layer_loader.h"

#include <gtest/gtest.h>

#include <map>

namespace kvasir::model {
namespace {

// Row r of each matrix is of bytes r, and its scale is r.
class Bytes final : public Weights {
 public:
  bool has(std::string_view name) const override { return names_.count(std::string(name)) > 0; }
  Result<HostTensor> get(std::string_view name, int64_t rows, int64_t cols) override {
    HostTensor t{std::string(name), WeightType::f8_e4m3, rows, cols, nullptr, rows * cols};
    std::shared_ptr<uint8_t[]> to(new uint8_t[size_t(rows * cols)]);
    for (int64_t r = 0; r < rows; ++r) {
      std::fill_n(to.get() + r * cols, cols, uint8_t(r));
      t.row_scales.push_back(float(r));
    }
    t.data = to.get();
    t.owned = std::move(to);
    return t;
  }
  void release(const HostTensor&) override {}
  int64_t parameters() const override { return 0; }
  int64_t bytes() const override { return 0; }
  std::vector<HostTensor> tensors() const override { return {}; }

  explicit Bytes(std::initializer_list<std::string> names) {
    for (const std::string& n : names) names_[n] = true;
  }

 private:
  std::map<std::string, bool> names_;
};

// Keeps which row each row of a matrix was, and checks that its scale came with it.
class Keeper final : public Ops {
 public:
  std::vector<std::vector<int>> matrices;

  Result<Matrix> load_matrix(Weights&, std::span<const HostTensor> parts, Shard) override {
    std::vector<int>& rows = matrices.emplace_back();
    for (const HostTensor& t : parts) {
      EXPECT_EQ(std::ssize(t.row_scales), t.rows) << t.name;
      for (int64_t r = 0; r < std::min<int64_t>(t.rows, std::ssize(t.row_scales)); ++r) {
        rows.push_back(t.data[r * t.row_bytes()]);
        EXPECT_EQ(t.row_scales[size_t(r)], float(rows.back())) << t.name << ", row " << r;
      }
    }
    return Matrix{int32_t(matrices.size()) - 1, std::ssize(rows), parts[0].cols};
  }
  Result<Vector> load_vector(Weights&, std::span<const HostTensor>, float, float) override { return Vector{0, 1}; }
  void set_bias(Matrix, Vector) override {}
  Result<Buffer> make_buffer(int64_t cols, bool, Shard) override { return Buffer{0, cols}; }
  Result<int32_t> add_attention(const attention::Attributes&) override { return 0; }
  Result<AdapterPtr> load_adapter(std::span<const LowRank>, int64_t) override { return unimplemented(""); }
  Status embed(Matrix, float, Buffer) override { return {}; }
  Status norm(Buffer, Vector, float, Buffer) override { return {}; }
  Status add_norm(Buffer, Vector, float, Buffer) override { return {}; }
  Status layer_norm(Buffer, Vector, Vector, float, Buffer) override { return {}; }
  Status qk_norm(Buffer, int64_t, Vector, int64_t, Vector, float) override { return {}; }
  Status qk_norm_over_ranks(Buffer, int64_t, Vector, int64_t, Vector, float) override { return {}; }
  Status scale_by_position(Buffer, int64_t, float, int64_t) override { return {}; }
  Status linear(Buffer, Matrix, Buffer) override { return {}; }
  Status add_linear(Buffer, Matrix, Buffer) override { return {}; }
  Status glu(Activation, Buffer, Buffer) override { return {}; }
  Status activate(Activation, Buffer, Buffer) override { return {}; }
  Status attend(const Attend&, Buffer, Buffer) override { return {}; }
  Status softcap(Buffer, float) override { return {}; }
  Status take_logit_rows(Buffer, int64_t, int64_t, Buffer) override { return {}; }
};

using Rows = std::vector<int>;

// Four query heads over two of keys and values, of two rows each: q0 q1 k0 v0 q2 q3 k1 v1 in the file.
TEST(LayerLoader, ScalesGoWithTheRowsOfHeads) {
  ModelConfig c;
  c.hidden = 16, c.heads = 4, c.kv_heads = 2, c.head_dim = 2, c.layers = 1, c.qkv_by_group = true;
  Bytes weights({"blk.0.attn_qkv.weight"});
  Keeper ops;
  const auto m = LayerLoader(c, weights, ops).qkv(0);
  ASSERT_TRUE(m.ok()) << m.status().message();
  EXPECT_EQ(ops.matrices[0], (Rows{0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15}));
}

TEST(LayerLoader, ScalesGoWithTheRowsOfExperts) {
  ModelConfig c;
  c.hidden = 16, c.layers = 1;
  c.experts.routing.experts = 3, c.experts.ffn = 2;
  for (bool by_turns : {false, true}) {
    SCOPED_TRACE(by_turns);
    c.experts.by_turns = by_turns;
    Bytes weights({"blk.0.ffn_gate_up_exps.weight", "blk.0.ffn_down_exps.weight"});
    Keeper ops;
    const auto e = LayerLoader(c, weights, ops).experts(0);
    ASSERT_TRUE(e.ok()) << e.status().message();
    ASSERT_EQ(ops.matrices.size(), 7u);  // the router first
    for (int i = 0; i < 3; ++i) {
      const int at = 4 * i;
      EXPECT_EQ(ops.matrices[size_t(1 + 2 * i)],
                by_turns ? (Rows{at, at + 2, at + 1, at + 3}) : (Rows{at, at + 1, at + 2, at + 3}));
      Rows down(16);
      for (int r = 0; r < 16; ++r) down[size_t(r)] = 16 * i + r;
      EXPECT_EQ(ops.matrices[size_t(2 + 2 * i)], down);
    }
  }
}

}  // namespace
}  // namespace kvasir::model
