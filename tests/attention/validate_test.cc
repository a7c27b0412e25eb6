// What the boundary refuses, and that its words name the tensor, the index and the limit.
#include "attention/validate.h"
#include "attention/rope.h"
#include "tests/attention/testing.h"

namespace kvasir::attention {
namespace {
using namespace testing;
using ::testing::Test;

struct Broken {
  const char* field;
  const char* says;
  void (*breaks)(Case&);
};

const Broken kBroken[] = {
    {"kvstarts", "sequence 1 has kvlen 12; with append it must be start_pos + seqlen = 7 + 3",
     [](Case& c) { c.kvstarts[2] += 2, c.kvstarts[3] += 2, c.max_kvlen += 2; }},
    {"seqstarts", "seqstarts[0] is 1; it must be 0", [](Case& c) { c.seqstarts[0] = 1; }},
    {"seqstarts", "sequence 1 would have a negative length", [](Case& c) { c.seqstarts[2] = 0; }},
    {"kvstarts", "sequence 1 would have a negative length", [](Case& c) { c.kvstarts[2] = 0; }},
    {"start_pos", "start_pos[0] is -1; it must be at least 0", [](Case& c) { c.start_pos[0] = -1; }},
    {"decoding_batches", "decoding_batches is 4; it must be from 0 to 3", [](Case& c) { c.decoding_batches = 4; }},
    {"max_seqlen", "max_seqlen is 8; the longest sequence has 9 tokens", [](Case& c) { c.max_seqlen = 8; }},
    {"max_kvlen", "max_kvlen is 20; the longest sequence has 21 keys", [](Case& c) { c.max_kvlen = 20; }},
    {"cachestarts", "cachestarts[1, 0] is -1", [](Case& c) { c.cachestarts[size_t(c.max_pages)] = -1; }},
    {"cachestarts", "as the cache holds", [](Case& c) { c.cachestarts[0] = c.view.max_tokens; }},
    {"cachestarts", "sequences 0 and 1 both write token slot",
     [](Case& c) {
       c.cachestarts[1] = c.cachestarts[size_t(c.max_pages)], c.start_pos[1] = 0, c.kvstarts[2] = 24,
       c.kvstarts[3] = 33, c.start_pos[0] = 16, c.kvstarts[1] = 17, c.kvstarts[2] = 20, c.kvstarts[3] = 29;
     }},
    {"num_kv_heads", "num_kv_heads is 3; it must be at least 1 and divide num_heads, which is 4",
     [](Case& c) { c.attributes.num_kv_heads = 3; }},
    {"head_dim", "head_dim is 577; it must be from 1 to 576", [](Case& c) { c.attributes.head_dim = 577; }},
    {"q_scaling", "q_scaling is nan", [](Case& c) { c.attributes.q_scaling = NAN; }},
    {"softcap", "softcap is -1", [](Case& c) { c.attributes.softcap = -1; }},
    {"sinks", "they must be from 0 to window-1", [](Case& c) { c.attributes.sinks = 4, c.attributes.window = 4; }},
    {"cyclic_capacity", "at least window slots, and window is 9",
     [](Case& c) { c.attributes.window = 9, c.attributes.cyclic_capacity = 8; }},
    {"page_size", "page_size is 0; it must be from 1 to 65536", [](Case& c) { c.attributes.page_size = 0; }},
    {"page_size", "page_size is 65537; it must be from 1 to 65536", [](Case& c) { c.attributes.page_size = 65537; }},
    {"quant_group", "quant_group is 12; it must be a power of two that divides head_dim, which is 32",
     [](Case& c) { c.view.quant = kvcache::QuantKind::group, c.view.dtype = DType::i8, c.view.quant_group = 12; }},
    {"quant_group", "quant_group is 0; it must be a power of two that divides head_dim, which is 32",
     [](Case& c) { c.view.quant = kvcache::QuantKind::group, c.view.dtype = DType::i8, c.view.quant_group = 0; }},
    {"out_dtype", "out_dtype int8 is for KeyValueCache", [](Case& c) { c.attributes.out = DType::i8; }},
    {"scale", "scale is absent",
     [](Case& c) { c.view.quant = kvcache::QuantKind::group, c.view.dtype = DType::i8, c.view.quant_group = 8; }},
    {"layer_idx", "layer_idx is 1; it must be from 0 to num_layer-1, which is 0", [](Case& c) { c.layer = 1; }},
    {"alibi_slopes", "alibi_slopes has 3 entries; it needs one for each of 4 heads",
     [](Case& c) {
       c.attributes.alibi_slopes = {1, 2, 3};
     }},
    {"relative_bias", "relative_bias has 8 entries; it needs 2 * reach + 1 for each of 4 heads",
     [](Case& c) { c.attributes.relative_bias.assign(8, 0); }},
    {"relative_bias", "relative_bias holds inf; it must be finite",
     [](Case& c) { c.attributes.relative_bias.assign(4, INFINITY); }},
    {"beam_width", "beam_width is 2; it must be at least 1 and divide the 3 sequences",
     [](Case& c) { c.beam_width = 2, c.indirection.assign(200, 0); }},
    {"current_key", "needed unless append is false", nullptr},
};

TEST(Validate, EachBrokenCaseIsNamedAndNothingIsWritten) {
  CaseShape s = small();
  s.sequences = {{20, 1}, {7, 3}, {0, 9}};
  for (const Broken& b : kBroken) {
    Case c = make_case(s);
    if (!b.breaks) {
      CaseOutput out;
      Tensors t = case_tensors(c, &out);
      t.key = nullptr;
      Status status = validate_tensors(c.attributes, t);
      EXPECT_EQ(status.field(), b.field);
      EXPECT_NE(status.message().find(b.says), std::string::npos) << status.message();
      continue;
    }
    b.breaks(c);
    for (const char* backend : {"reference", "cpu"}) {
      Outcome o = run_on(backend, c);
      EXPECT_EQ(o.status.code(), Code::invalid_argument) << b.says;
      EXPECT_EQ(o.status.field(), b.field) << o.status.message();
      EXPECT_NE(o.status.message().find(b.says), std::string::npos) << o.status.message() << "\n  wanted: " << b.says;
      EXPECT_EQ(o.after.cache, c.cache);
    }
  }
}

TEST(Validate, UnknownBackendNamesTheKnown) {
  Status s = find_backend("tpu").status();
  EXPECT_EQ(s.code(), Code::not_found);
  EXPECT_NE(s.message().find("cpu, reference"), std::string::npos) << s.message();
}

// ---- rope frequencies (host) --------------------------------------------------------------------------

RopeConfig config(RopeScaling scaling) {
  RopeConfig r;
  r.rotary_dim = 64;
  r.scaling = scaling;
  r.factor = 8;
  r.original_context = 4096;
  return r;
}

TEST(Rope, BaseAndLinear) {
  Rope base = rope_frequencies(config(RopeScaling::none)).value();
  Rope linear = rope_frequencies(config(RopeScaling::linear)).value();
  EXPECT_FLOAT_EQ(base.inv_freq[0], 1.0f);
  EXPECT_FLOAT_EQ(base.inv_freq[16], 0.01f);
  for (size_t i = 0; i < 32; ++i) EXPECT_FLOAT_EQ(linear.inv_freq[i], base.inv_freq[i] / 8);
}

TEST(Rope, Llama3KeepsShortWavesAndDividesLongOnes) {
  RopeConfig r = config(RopeScaling::llama3);
  r.base = 500000;
  Rope plain = rope_frequencies([&] {
                 RopeConfig p = r;
                 p.scaling = RopeScaling::none;
                 return p;
               }())
                   .value();
  Rope scaled = rope_frequencies(r).value();
  EXPECT_FLOAT_EQ(scaled.inv_freq[0], plain.inv_freq[0]);
  EXPECT_FLOAT_EQ(scaled.inv_freq[31], plain.inv_freq[31] / 8);
  for (size_t i = 1; i < 32; ++i) EXPECT_LT(scaled.inv_freq[i], scaled.inv_freq[i - 1]);
}

TEST(Rope, YarnRampsBetweenItsBetasAndHasAMagnitude) {
  Rope plain = rope_frequencies(config(RopeScaling::none)).value();
  Rope yarn = rope_frequencies(config(RopeScaling::yarn)).value();
  EXPECT_FLOAT_EQ(yarn.inv_freq[0], plain.inv_freq[0]);
  EXPECT_FLOAT_EQ(yarn.inv_freq[31], plain.inv_freq[31] / 8);
  EXPECT_NEAR(yarn.magnitude, 0.1 * std::log(8.0) + 1, 1e-6);
  RopeConfig set = config(RopeScaling::yarn);
  set.attention_factor = 1.5;
  EXPECT_FLOAT_EQ(rope_frequencies(set).value().magnitude, 1.5f);
}

TEST(Rope, LongRopeChoosesItsSetOnceByConfiguredContext) {
  RopeConfig r = config(RopeScaling::longrope);
  r.short_factor.assign(32, 2.0f);
  r.long_factor.assign(32, 4.0f);
  r.configured_context = 4096;
  Rope plain = rope_frequencies(config(RopeScaling::none)).value();
  EXPECT_FLOAT_EQ(rope_frequencies(r).value().inv_freq[3], plain.inv_freq[3] / 2);
  EXPECT_FLOAT_EQ(rope_frequencies(r).value().magnitude, 1.0f);
  r.configured_context = 131072;
  EXPECT_FLOAT_EQ(rope_frequencies(r).value().inv_freq[3], plain.inv_freq[3] / 4);
  EXPECT_NEAR(rope_frequencies(r).value().magnitude, std::sqrt(1 + std::log(32.0) / std::log(4096.0)), 1e-6);
  r.long_factor.pop_back();
  EXPECT_EQ(rope_frequencies(r).status().field(), "rope.long_factor");
}

}  // namespace
}  // namespace kvasir::attention
