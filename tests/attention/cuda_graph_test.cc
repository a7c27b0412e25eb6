// A captured graph is replayed while lengths change: what changes from step to step lies in device memory.
#include <algorithm>
#include <map>
#include <random>

#include "tests/attention/cuda_testing.h"

namespace kvasir::attention {
namespace {
using namespace testing;

// Eight sequences that decode together on a bfloat16 cache of their own, a token a step. `latent`: on one of keys
// alone.
class Decoding {
 public:
  static constexpr int kBatch = 8, kHeads = 8, kPage = 16, kPages = 40;

  explicit Decoding(bool latent)
      : kv_heads_(latent ? 1 : 2), dim_(latent ? 576 : 128), table_(size_t(kBatch * kPages)) {
    Attributes a;
    a.unread_columns = latent ? 64 : 0;
    a.num_heads = kHeads, a.num_kv_heads = kv_heads_, a.head_dim = dim_;
    a.io = a.out = DType::bf16;
    a.page_size = kPage;
    const int64_t tokens = kBatch * kPages * kPage;
    ok(cudaStreamCreate(&stream_));
    std::mt19937 random(7);
    for (size_t i = 0; i < table_.size(); ++i) table_[i] = int64_t(i) * kPage;
    std::shuffle(table_.begin(), table_.end(), random);
    auto fill = [&](cuda::DeviceMemory& m, int64_t elements) {
      std::vector<uint16_t> x(static_cast<size_t>(elements));
      for (uint16_t& e : x) e = uint16_t((random() & 0x807f) | 0x3f00);  // +-[0.5, 1)
      EXPECT_TRUE(m.upload(x.data(), x.size() * 2).ok());
    };
    fill(cache_, tokens * 2 * kv_heads_ * dim_);
    fill(query_, kBatch * kHeads * dim_);
    fill(key_, kBatch * kv_heads_ * dim_);
    fill(value_, kBatch * kv_heads_ * dim_);
    EXPECT_TRUE(output_.upload(std::vector<uint16_t>(size_t(kBatch * kHeads * dim_)).data(), kBatch * kHeads * dim_ * 2)
                    .ok());  // some columns may be left as they are
    tensors_.query = query_.get(), tensors_.key = key_.get(), tensors_.value = value_.get();
    tensors_.output = output_.get();
    kvcache::CacheView& v = tensors_.cache;
    v.data = cache_.get(), v.dtype = DType::bf16, v.max_tokens = tokens, v.kv_heads = kv_heads_, v.head_dim = dim_;
    v.strides = kvcache::layout_strides(2, 2, tokens, 1, kv_heads_, dim_).value();
    if (latent) v.strides.kv = 0;
    auto made = cuda_backend().create(a, {kBatch, kBatch, kPages * kPage, kPages, tokens}, {nullptr, stream_});
    EXPECT_TRUE(made.ok()) << made.status().to_string();
    attention_ = std::move(*made);
  }
  ~Decoding() {
    for (auto& [key, graph] : graphs_) cudaGraphExecDestroy(graph);
    attention_.reset();
    cudaStreamDestroy(stream_);
  }

  // One step of sequences of `lengths`; by a graph captured when such a step was first seen, or launched anew.
  std::vector<uint16_t> step(const std::vector<int64_t>& lengths, bool by_graph) {
    std::vector<int64_t> seqstarts{0}, kvstarts{0}, start_pos;
    for (int64_t n : lengths) {
      seqstarts.push_back(seqstarts.back() + 1);
      kvstarts.push_back(kvstarts.back() + n);
      start_pos.push_back(n - 1);
    }
    Step step;
    step.batch = step.decoding_batches = kBatch;
    step.seqstarts = seqstarts.data(), step.kvstarts = kvstarts.data(), step.start_pos = start_pos.data();
    step.cachestarts = table_.data(), step.max_pages = kPages;
    step.max_seqlen = 1, step.max_kvlen = *std::max_element(lengths.begin(), lengths.end());
    Status status = attention_->plan(step);
    EXPECT_TRUE(status.ok()) << status.to_string();
    const uint64_t key = dynamic_cast<cuda::GraphKeyed&>(*attention_).launch_key();
    if (!by_graph || key == 0) {  // the first run learns what the cache is
      status = attention_->run(tensors_);
      EXPECT_TRUE(status.ok()) << status.to_string();
    } else {
      if (!graphs_.count(key)) {
        cudaGraph_t graph;
        ok(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
        status = attention_->run(tensors_);
        EXPECT_TRUE(status.ok()) << status.to_string();
        ok(cudaStreamEndCapture(stream_, &graph));
        ok(cudaGraphInstantiate(&graphs_[key], graph, 0));
        ok(cudaGraphDestroy(graph));
      } else {
        ++replays;
      }
      ok(cudaGraphLaunch(graphs_[key], stream_));
    }
    std::vector<uint16_t> out(size_t(kBatch * kHeads * dim_));
    ok(cudaStreamSynchronize(stream_));
    ok(cudaMemcpy(out.data(), output_.get(), out.size() * 2, cudaMemcpyDefault));
    return out;
  }
  int replays = 0;

 private:
  static void ok(cudaError_t e) { EXPECT_EQ(e, cudaSuccess) << cudaGetErrorString(e); }

  const int kv_heads_, dim_;
  cudaStream_t stream_ = nullptr;
  std::vector<int64_t> table_;
  cuda::DeviceMemory cache_, query_, key_, value_, output_;
  Tensors tensors_;
  std::unique_ptr<Attention> attention_;
  std::map<uint64_t, cudaGraphExec_t> graphs_;
};

TEST_F(Cuda, AGraphIsReplayedWhileLengthsChange) {
  for (bool latent : {false, true}) {
    Decoding launched(latent), replayed(latent);
    std::vector<int64_t> lengths{1, 17, 64, 65, 128, 300, 511, 600};
    for (int i = 0; i < 24; ++i) {
      ASSERT_TRUE(launched.step(lengths, false) == replayed.step(lengths, true)) << "step " << i;
      for (size_t b = 0; b < lengths.size(); ++b) lengths[b] = 1 + (lengths[b] + int64_t(b) * 7) % 630;
    }
    EXPECT_GE(replayed.replays, 12) << "few shapes of launch serve many lengths";
  }
}

}  // namespace
}  // namespace kvasir::attention
