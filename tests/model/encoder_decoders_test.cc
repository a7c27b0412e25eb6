// Encoder-decoders as transformers computes them, whichever way a request travels, and what is refused of them.
#include <gmock/gmock.h>
#include <unistd.h>

#include "model/arch/t5_network.h"
#include "model/formats/gguf_model.h"
#include "model/sides.h"
#include "tests/model/architectures.h"

namespace kvasir::model {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using Ids = std::vector<int32_t>;

const json& stored() {
  static const json all = fixture("t5.json");
  return all;
}

Ids joined(Ids a, const Ids& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// What a sequence begins with: a prompt, and behind it the token that the decoder begins with.
struct Prompt {
  Ids tokens;
  int64_t source = 0;
  Prompt(const json& one, size_t which) : tokens(stored()["prompts"][which].get<Ids>()), source(std::ssize(tokens)) {
    tokens.push_back(one["configs"][0]["decoder_start_token_id"].get<int32_t>());
  }
  Piece piece(int seq, const Ids& more = {}) const {
    return {.seq = seq, .begin = 0, .tokens = joined(tokens, more), .source = source};
  }
  // `tokens` behind `known` others.
  Piece piece(int seq, int64_t known, Ids more) const {
    return {.seq = seq, .begin = std::ssize(tokens) + known, .tokens = std::move(more), .source = source};
  }
};

TEST(EncoderDecoders, BucketsOfDistancesAreAsTransformersHasThem) {
  const json& all = stored()["buckets"];
  const int64_t first = all["distances"][0];
  for (const json& one : all["cases"])
    for (size_t i = 0; i < one[3].size(); ++i)
      ASSERT_EQ(bias_bucket(first + int64_t(i), one[0], one[1], one[2]), one[3][i])
          << one[1] << " " << first + int64_t(i);
}

// The greatest difference of a log-probability over the stored rows.
double worst(const std::string& path, const json& one) {
  const Ids answer = stored()["answer"], rows = stored()["rows"];
  SamplingParams params = Drive::greedy();
  params.logprobs = 256;
  Drive drive(path, 2, true, 128);
  double out = 0;
  for (size_t p = 0; p < stored()["prompts"].size(); ++p) {
    Piece whole = Prompt(one, p).piece(0, answer);
    whole.every = true;
    const auto got = drive.step({whole}, params);
    EXPECT_EQ(got.size(), answer.size() + 1);
    for (size_t i = 0; i < rows.size(); ++i)
      for (const TokenLogprob& t : got[size_t(rows[i])].top)
        out = std::max(out, std::fabs(double(t.logprob) - one["logprobs"][p][i][size_t(t.token)].get<double>()));
  }
  return out;
}

TEST(EncoderDecoders, LogProbabilitiesAreAsTransformersHasThem) {
  for (const json& one : stored()["cases"])
    for (size_t config = 0; config < one["configs"].size(); ++config) {
      SCOPED_TRACE(one["name"].get<std::string>() + ", configuration " + std::to_string(config));
      Folder folder("t5");
      StoredNetwork(one).write_folder(folder, config);
      EXPECT_LT(worst(folder.path.string(), one), 1e-3);
    }
}

// As llama.cpp's converter writes them.
TEST(EncoderDecoders, AGgufFileIsAsTransformersHasIt) {
  int files = 0;
  for (const json& one : stored()["cases"]) {
    const StoredNetwork network(one);
    if (!network.has_gguf()) continue;
    SCOPED_TRACE(one["name"].get<std::string>());
    Folder folder("t5-gguf");
    folder.write("m.gguf", network.gguf());
    EXPECT_LT(worst(folder.path.string(), one), 1e-3);
    ++files;
  }
  EXPECT_EQ(files, 2);
}

TEST(EncoderDecoders, AGgufFileOfAnotherKindIsRefusedByName) {
  json one = stored()["cases"][0];
  auto refusal = [&] {
    Folder folder("t5-gguf-refused");
    folder.write("m.gguf", StoredNetwork(one).gguf());
    RunnerOptions o;
    o.model = folder.path.string();
    return load_runner(o).status().message();
  };
  const json whole = one["gguf"];
  one["gguf"]["tensors"].push_back({"enc.blk.1.attn_rel_b.weight",
                                    {32, 4},
                                    "same",
                                    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"});
  EXPECT_THAT(refusal(), HasSubstr("biases of their own (UMT5)"));
  one["gguf"] = whole;
  one["gguf"]["kv"].push_back({"attention.sliding_window", 4, 8, 4});
  EXPECT_THAT(refusal(), HasSubstr("t5.attention.sliding_window"));
  one["gguf"] = whole;
  one["gguf"]["kv"].push_back({"attention.head_count_kv", 4, 2, 4});
  EXPECT_THAT(refusal(), HasSubstr("t5.attention.head_count_kv is 2"));
  one["gguf"] = whole;
  one["gguf"]["kv"].push_back({"decoder_width", 4, 8, 4});
  EXPECT_THAT(refusal(), HasSubstr("t5.decoder_width"));
}

TEST(EncoderDecoders, AGgufFilesVocabularyIsReadWithWhatAllOfThemAre) {
  GgufText out;
  out.put(uint32_t(0x46554747)).put(uint32_t(3)).put(uint64_t(0)).put(uint64_t(4));
  out.name("tokenizer.ggml.model").put(uint32_t(8)).name("t5");
  out.name("tokenizer.ggml.tokens").put(uint32_t(9)).put(uint32_t(8)).put(uint64_t(3));
  for (const char* token : {"<pad>", "</s>", "<unk>"}) out.name(token);
  out.name("tokenizer.ggml.remove_extra_whitespaces").put(uint32_t(7)).put(uint8_t(1));
  out.name("tokenizer.ggml.precompiled_charsmap").put(uint32_t(9)).put(uint32_t(0)).put(uint64_t(2));
  out.put(uint8_t(7)).put(uint8_t(200));
  const std::string text = out.pad().text;
  auto file = Gguf::parse("m.gguf", {reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  ASSERT_TRUE(file.ok()) << file.status().message();
  auto v = gguf_vocab(**file);
  ASSERT_TRUE(v.ok()) << v.status().message();
  EXPECT_EQ(v->model, "t5");
  EXPECT_EQ(v->eos, 1);
  EXPECT_EQ(v->unk, 2);
  EXPECT_TRUE(v->add_eos && !v->add_bos && v->remove_extra_spaces);
  EXPECT_EQ(v->charsmap, (std::vector<uint8_t>{7, 200}));
}

struct Answer {
  Ids tokens;
  std::vector<float> logprobs;
  bool operator==(const Answer&) const = default;
  void add(const Sampled& s) { tokens.push_back(s.token), logprobs.push_back(s.logprob); }
};

Answer alone(Drive& drive, const Prompt& prompt, size_t length) {
  Answer out;
  out.add(drive.step({prompt.piece(0)})[0]);
  while (out.tokens.size() < length)
    out.add(drive.step({prompt.piece(0, std::ssize(out.tokens) - 1, {out.tokens.back()})})[0]);
  return out;
}

TEST(EncoderDecoders, GreedyAnswersAreTransformersOwn) {
  for (const json& one : stored()["cases"]) {
    SCOPED_TRACE(one["name"].get<std::string>());
    Folder folder("t5");
    StoredNetwork(one).write_folder(folder);
    Drive drive(folder.path.string(), 2, true, 128);
    for (size_t p = 0; p < one["greedy"].size(); ++p) {
      const Ids expected = one["greedy"][p];
      EXPECT_EQ(alone(drive, Prompt(one, p), expected.size()).tokens, expected) << "prompt " << p;
    }
  }
}

kvcache::FormWish wish(const char* dtype, int32_t group = -1) {
  kvcache::FormWish w;
  w.dtype = dtype, w.group = group;
  return w;
}

// Sequences of other lengths beside it, one joining after another; and computed again behind its prompt, at once or in
// two pieces.
TEST(EncoderDecoders, AloneBatchedAndComputedAgainAreEqualToTheBit) {
  constexpr size_t kLength = 12;
  for (const json& one : stored()["cases"])
    for (const kvcache::FormWish& kv :
         {wish("float32"), wish("float16"), wish("bfloat16"), wish("fp8"), wish("int8", 8)}) {
      SCOPED_TRACE(one["name"].get<std::string>() + " " + kv.dtype);
      Folder folder("t5");
      StoredNetwork(one).write_folder(folder);
      RunnerOptions o;
      o.model = folder.path.string(), o.threads = 2, o.kv = kv;
      Drive drive(o, 128, 3, 256);
      std::vector<Prompt> prompts;
      std::vector<Answer> expected;
      for (size_t p = 0; p < 3; ++p) {
        prompts.emplace_back(one, p);
        expected.push_back(alone(drive, prompts[p], kLength));
      }
      std::vector<Answer> got(3);
      for (size_t step = 0; step < kLength + 2; ++step) {
        std::vector<Piece> pieces;
        std::vector<size_t> of;
        for (size_t p = 0; p < 3; ++p)
          if (!got[p].tokens.empty() && got[p].tokens.size() < kLength)
            pieces.push_back(prompts[p].piece(int(p), std::ssize(got[p].tokens) - 1, {got[p].tokens.back()})),
                of.push_back(p);
        if (step < 3) pieces.push_back(prompts[step].piece(int(step))), of.push_back(step);
        const auto rows = drive.step(pieces);
        for (size_t i = 0; i < of.size(); ++i) got[of[i]].add(rows[i]);
      }
      EXPECT_EQ(got, expected) << "batched";
      for (size_t p = 0; p < 3; ++p) {
        const Ids known(expected[p].tokens.begin(), expected[p].tokens.begin() + 7);
        Sampled again = drive.step({prompts[p].piece(2, known)})[0];
        EXPECT_EQ(again.token, expected[p].tokens[7]);
        EXPECT_EQ(again.logprob, expected[p].logprobs[7]) << "computed again";
        drive.step({prompts[p].piece(1)});
        again = drive.step({prompts[p].piece(1, 0, known)})[0];
        EXPECT_EQ(again.logprob, expected[p].logprobs[7]) << "in two pieces";
      }
    }
}

TEST(Sides, AStepIsItsSourcesTheirTargetsAndWhatTheseReadOfThem) {
  Batch b;  // a decode of a source of 3, and a prompt of 2 with its decoder's first token
  b.tokens = {50, 10, 11, 7};
  b.positions = {4, 0, 1, 2};
  b.seqstarts = {0, 1, 4};
  b.kvstarts = {0, 5, 8};
  b.start_pos = {4, 0};
  b.sources = {3, 2};
  b.cachestarts = {8, 0, 4, 12};
  b.max_pages = 2;
  b.decoding_batches = 1;
  b.logit_rows = {0, 3, 3};
  Sides sides;
  sides.take(b, b.tokens, kvcache::IndexMode::page_table, 4);
  using Ints = std::vector<int64_t>;
  const Batch &source = sides.of(Side::source), &target = sides.of(Side::target), &cross = sides.of(Side::cross);
  EXPECT_EQ(source.tokens, (Ids{10, 11}));
  EXPECT_EQ(source.kvstarts, (Ints{0, 2}));
  EXPECT_EQ(source.cachestarts, (Ints{4, 5}));
  EXPECT_EQ(target.tokens, (Ids{50, 7}));
  EXPECT_EQ(target.positions, (Ids{1, 0}));
  EXPECT_EQ(target.start_pos, (Ints{1, 0}));
  EXPECT_EQ(target.kvstarts, (Ints{0, 2, 3}));
  EXPECT_EQ(target.cachestarts, (Ints{11, 0, 6}));
  EXPECT_EQ(target.logit_rows, (Ids{0, 1, 1}));
  EXPECT_EQ(target.decoding_batches, 1);
  EXPECT_EQ(cross.seqstarts, target.seqstarts);
  EXPECT_EQ(cross.kvstarts, (Ints{0, 3, 5}));
  EXPECT_EQ(cross.cachestarts, (Ints{8, 9, 10, 4, 5}));
}

Status loaded(const json& one, const json& config, RunnerOptions options = {}) {
  Folder folder("t5-refused");
  StoredNetwork(one).write_folder(folder);
  folder.write("config.json", config.dump());
  options.model = folder.path.string();
  options.max_kvlen = 64;
  return load_runner(options).status();
}

TEST(EncoderDecoders, AKeyThatChangesNumbersIsReadOrRefusedByName) {
  const struct {
    const char* key;
    json value;
    const char* says;
  } wrong[] = {{"feed_forward_proj", "gated-mish", "feed_forward_proj is 'gated-mish'"},
               {"feed_forward_proj", "gated-gelu", "dense_act_fn is \"relu\""},
               {"dense_act_fn", "gelu", "dense_act_fn is \"gelu\""},
               {"is_gated_act", true, "is_gated_act is true"},
               {"num_key_value_heads", 2, "num_key_value_heads is 2"},
               {"is_encoder_decoder", false, "is_encoder_decoder is false"},
               {"architectures", {"T5EncoderModel"}, "architectures has T5EncoderModel"},
               {"relative_attention_num_buckets", 2, "relative_attention_num_buckets is 2"},
               {"relative_attention_max_distance", 3, "relative_attention_max_distance is 3"},
               {"decoder_start_token_id", 256, "decoder_start_token_id is 256"},
               {"num_decoder_layers", 0, "number of decoder layers is 0"},
               {"num_decoder_layers", 4, "decoder.block.2"},
               {"num_layers", "three", "num_layers must be a whole number"},
               {"d_kv", 0, "head size is 0"},
               {"d_model", nullptr, "hidden_size is missing"},
               {"tie_word_embeddings", "yes", "tie_word_embeddings must be true or false"},
               {"sliding_window", 8, "sliding_window is 8"}};
  const json& one = stored()["cases"][0];
  EXPECT_TRUE(loaded(one, one["configs"][0]).ok());
  for (const auto& w : wrong) {
    json config = one["configs"][0];
    config[w.key] = w.value;
    EXPECT_THAT(loaded(one, config).message(), HasSubstr(w.says)) << w.key << " " << w.value;
  }
}

TEST(EncoderDecoders, AStepThatSaysNoSourcesIsRefused) {
  const json& one = stored()["cases"][0];
  Folder folder("t5-sources");
  StoredNetwork(one).write_folder(folder);
  Drive drive(folder.path.string(), 1, true, 64);
  Batch b;
  b.tokens = {1, 2}, b.positions = {0, 1};
  b.seqstarts = b.kvstarts = {0, 2};
  b.start_pos = {0}, b.cachestarts = {0};
  b.max_pages = 1, b.max_seqlen = b.max_kvlen = 2;
  EXPECT_THAT(drive.runner->launch(b, {}).message(), HasSubstr("a step of 1 sequences says the sources of 0"));
}

TEST(EncoderDecoders, WhatTheyCannotDoIsRefusedByName) {
  const json& one = stored()["cases"][0];
  RunnerOptions ranks;
  ranks.ranks = 2;
  EXPECT_THAT(loaded(one, one["configs"][0], ranks).message(),
              HasSubstr("encoder-decoders are not split over ranks: 1"));
  RunnerOptions streaming;
  streaming.attention_window = 32;
  EXPECT_THAT(loaded(one, one["configs"][0], streaming).message(), HasSubstr("attention_window"));
}

}  // namespace
}  // namespace kvasir::model
