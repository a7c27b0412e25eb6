// The C interface gives what the C++ one gives, through the shared library, and its errors have words.
#include "attention/c_api.h"

#include "tests/attention/testing.h"

namespace kvasir::attention {
namespace {
using namespace testing;

struct InC {
  kvasir_attention_attributes attributes = {};
  kvasir_attention_limits limits = {};
  kvasir_attention_step step = {};
  kvasir_attention_cache cache = {};
};

InC to_c(Case& c) {
  const Attributes& a = c.attributes;
  InC x;
  x.attributes.num_heads = a.num_heads;
  x.attributes.num_kv_heads = a.num_kv_heads;
  x.attributes.head_dim = a.head_dim;
  x.attributes.is_causal = a.is_causal;
  x.attributes.return_lse = a.return_lse;
  x.attributes.index_mode = int(a.index_mode);
  x.attributes.page_size = a.page_size;
  if (!a.relative_bias.empty()) {
    x.attributes.relative_bias = a.relative_bias.data();
    x.attributes.relative_reach = int32_t(a.relative_bias.size()) / a.num_heads / 2;
  }
  const Limits l = c.limits();
  x.limits = {l.max_batch, l.max_tokens, l.max_kvlen, l.max_pages, l.cache_tokens};
  const Step s = c.step();
  x.step = {
      s.batch,     s.seqstarts, s.kvstarts, s.start_pos, s.cachestarts, s.max_pages, s.decoding_batches, s.max_seqlen,
      s.max_kvlen, nullptr,     0};
  x.cache.data = c.cache.data();
  x.cache.dtype = KVASIR_F16;
  x.cache.max_tokens = c.view.max_tokens;
  x.cache.cache_layout = c.layout;
  return x;
}

Case half_case() {
  CaseShape s = small();
  s.cache.dtype = DType::f16;
  s.sequences = {{20, 1}, {0, 9}};
  return make_case(s);
}

TEST(CApi, RunsAsTheCppInterfaceDoes) {
  Case c = half_case();
  for (int i = 0; i < c.attributes.num_heads * 7; ++i) c.attributes.relative_bias.push_back(float(i % 5));
  const Outcome want = run_on("cpu", c);
  InC x = to_c(c);
  kvasir_attention* op = nullptr;
  ASSERT_EQ(kvasir_attention_create(&x.attributes, &x.limits, "cpu", 2, nullptr, &op), 0) << kvasir_attention_error();
  ASSERT_EQ(kvasir_attention_plan(op, &x.step), 0) << kvasir_attention_error();
  CaseOutput out;
  Tensors t = case_tensors(c, &out);
  kvasir_attention_tensors tensors = {};
  tensors.query = t.query, tensors.key = t.key, tensors.value = t.value;
  tensors.output = t.output, tensors.lse = t.lse;
  tensors.cache = x.cache;
  ASSERT_EQ(kvasir_attention_run(op, &tensors), 0) << kvasir_attention_error();
  EXPECT_TRUE(same_bytes(out, want.out));
  EXPECT_EQ(c.cache, want.after.cache);
  kvasir_attention_destroy(op);
}

TEST(CApi, StoresAndGathers) {
  Case c = half_case();
  c.op = Op::key_value_cache;
  const Outcome want = run_on("cpu", c);
  InC x = to_c(c);
  kvasir_attention* op = nullptr;
  ASSERT_EQ(kvasir_attention_create(&x.attributes, &x.limits, "reference", 1, nullptr, &op), 0)
      << kvasir_attention_error();
  ASSERT_EQ(kvasir_attention_plan(op, &x.step), 0) << kvasir_attention_error();
  CaseOutput out;
  KvcTensors t = case_kvc_tensors(c, &out);
  kvasir_kvc_tensors tensors = {t.key, t.value, t.key_out, t.value_out, 0, x.cache};
  ASSERT_EQ(kvasir_attention_store_and_gather(op, &tensors), 0) << kvasir_attention_error();
  EXPECT_EQ(out.key, want.out.key);
  EXPECT_EQ(out.value, want.out.value);
  kvasir_attention_destroy(op);
}

TEST(CApi, StoresWithoutGivingBack) {
  for (const char* backend : {"reference", "cpu"}) {
    Case c = half_case();
    c.op = Op::key_value_cache;
    const Outcome want = run_on("cpu", c);
    InC x = to_c(c);
    kvasir_attention* op = nullptr;
    ASSERT_EQ(kvasir_attention_create(&x.attributes, &x.limits, backend, 1, nullptr, &op), 0);
    ASSERT_EQ(kvasir_attention_plan(op, &x.step), 0) << kvasir_attention_error();
    CaseOutput out;
    const KvcTensors t = case_kvc_tensors(c, &out);
    kvasir_kvc_tensors tensors = {t.key, t.value, t.key_out, nullptr, 0, x.cache};
    EXPECT_EQ(kvasir_attention_store_and_gather(op, &tensors), int(Code::invalid_argument));
    EXPECT_NE(c.cache, want.after.cache);
    tensors.key_out = nullptr;
    ASSERT_EQ(kvasir_attention_store_and_gather(op, &tensors), 0) << kvasir_attention_error();
    EXPECT_EQ(c.cache, want.after.cache) << backend;
    kvasir_attention_destroy(op);
  }
}

TEST(CApi, ErrorsHaveACodeAndWords) {
  Case c = half_case();
  InC x = to_c(c);
  kvasir_attention* op = nullptr;
  EXPECT_EQ(kvasir_attention_create(&x.attributes, &x.limits, "tpu", 1, nullptr, &op), int(Code::not_found));
  EXPECT_NE(std::string(kvasir_attention_error()).find("'tpu'"), std::string::npos);
  const float bias = 0;
  x.attributes.relative_bias = &bias, x.attributes.relative_reach = -1;
  EXPECT_EQ(kvasir_attention_create(&x.attributes, &x.limits, "cpu", 1, nullptr, &op), int(Code::invalid_argument));
  EXPECT_EQ(std::string(kvasir_attention_error()), "relative_reach is -1; it must be from 0 to 16777216");
  x.attributes.relative_bias = nullptr;
  x.attributes.io_dtype = 77;
  EXPECT_EQ(kvasir_attention_create(&x.attributes, &x.limits, "cpu", 1, nullptr, &op), int(Code::invalid_argument));
  EXPECT_NE(std::string(kvasir_attention_error()).find("io_dtype is 77"), std::string::npos);
  EXPECT_EQ(kvasir_attention_plan(nullptr, &x.step), int(Code::invalid_argument));
  x.attributes.io_dtype = KVASIR_F32;
  int no_stream = 0;
  EXPECT_EQ(kvasir_attention_create(&x.attributes, &x.limits, "cpu", 1, &no_stream, &op), int(Code::invalid_argument));
  EXPECT_NE(std::string(kvasir_attention_error()).find("stream is given"), std::string::npos);
  ASSERT_EQ(kvasir_attention_create(&x.attributes, &x.limits, "cpu", 1, nullptr, &op), 0);
  x.step.max_kvlen = 3;
  EXPECT_EQ(kvasir_attention_plan(op, &x.step), int(Code::invalid_argument));
  kvasir_attention_tensors tensors = {};
  tensors.cache = x.cache;
  tensors.cache.max_tokens = 1;
  EXPECT_EQ(kvasir_attention_run(op, &tensors), int(Code::invalid_argument));
  EXPECT_NE(std::string(kvasir_attention_error()).find("cache holds 1 tokens"), std::string::npos);
  kvasir_attention_destroy(op);
}

}  // namespace
}  // namespace kvasir::attention
