// generation_config.json: what it says of sampling and of the tokens that end an answer, of whatever can be served.
#include "model/generation_config.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "model/load.h"
#include "model/runner.h"

namespace kvasir::model {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

Result<GenerationConfig> read(std::string_view text) { return generation_config_from_json(text, "g.json"); }

TEST(GenerationConfig, EachKeyIsARequestsField) {
  auto c = read(R"({"temperature":0.6,"top_p":0.9,"top_k":20,"min_p":0.05,"typical_p":0.8,"repetition_penalty":1.1,
                    "do_sample":true,"max_new_tokens":7,"bos_token_id":1,"eos_token_id":[2,5],"transformers_version":"4"})");
  ASSERT_TRUE(c.ok()) << c.status().message();
  EXPECT_EQ(c->sampling.temperature, 0.6f);
  EXPECT_EQ(c->sampling.top_p, 0.9f);
  EXPECT_EQ(c->sampling.top_k, 20);
  EXPECT_EQ(c->sampling.min_p, 0.05f);
  EXPECT_EQ(c->sampling.typical_p, 0.8f);
  EXPECT_EQ(c->sampling.repetition_penalty, 1.1f);
  EXPECT_THAT(c->end_of_generation, ElementsAre(2, 5));
  EXPECT_EQ(c->sampling_json(),
            R"({"min_p":0.05,"repetition_penalty":1.1,"temperature":0.6,"top_k":20,"top_p":0.9,"typical_p":0.8})");
}

TEST(GenerationConfig, UnsetAndNullAreTheUsualValues) {
  for (const char* text : {"{}", R"({"temperature":null,"top_k":null,"eos_token_id":null})"}) {
    auto c = read(text);
    ASSERT_TRUE(c.ok()) << c.status().message();
    EXPECT_EQ(c->sampling_json(), "{}");
    EXPECT_THAT(c->end_of_generation, IsEmpty());
  }
  EXPECT_THAT(read(R"({"eos_token_id":3})")->end_of_generation, ElementsAre(3));
}

TEST(GenerationConfig, BadValuesAreRefusedByName) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "g.json is not a JSON object"},
      {"[1]", "g.json is not a JSON object"},
      {R"({"temperature":"hot"})", R"(g.json: temperature is "hot"; it must be a number)"},
      {R"({"temperature":-1})", "g.json: temperature is -1; it must be a number from 0 to 100"},
      {R"({"top_p":0})", "g.json: top_p is 0"},
      {R"({"top_k":2.5})", "g.json: top_k is 2.5"},
      {R"({"top_k":4294967296})", "g.json: top_k is 4294967296"},
      {R"({"repetition_penalty":0})", "g.json: repetition_penalty is 0"},
      {R"({"eos_token_id":-1})", "g.json: eos_token_id is -1; it must be a token id or a list of them"},
      {R"({"eos_token_id":[1,"x"]})", R"(g.json: eos_token_id is "x")"},
  };
  for (const auto& [text, message] : cases) EXPECT_THAT(read(text).status().message(), HasSubstr(message)) << text;
}

class Folder : public testing::Test {
 protected:
  Folder() : path_(fs::temp_directory_path() / ("kvasir-generation-" + std::to_string(getpid()))) {
    fs::create_directory(path_);
    write("config.json", "{}");
    write("model.safetensors", "");
    write("tokenizer.json", R"({"version":"1.0","added_tokens":[{"id":4,"content":"<|eot|>","single_word":false,
      "lstrip":false,"rstrip":false,"normalized":false,"special":true}],"normalizer":null,"pre_tokenizer":
      {"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},"post_processor":null,
      "decoder":{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true},
      "model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2,"\u0120":3},"merges":["a b"]}})");
    write("tokenizer_config.json", R"({"eos_token":"<|eot|>"})");
  }
  ~Folder() override { fs::remove_all(path_); }
  void write(const char* name, std::string_view text) { std::ofstream(path_ / name) << text; }
  Result<ModelText> text() {
    RunnerOptions o;
    o.model = path_.string();
    return load_text(o);
  }
  fs::path path_;
};

TEST_F(Folder, ItsTokensEndAnswersToo) {
  EXPECT_EQ(read_generation_config(path_.string())->sampling_json(), "{}");
  EXPECT_THAT((*text()).tokenizer->end_of_generation(), ElementsAre(4));
  write("generation_config.json", R"({"top_k":3,"eos_token_id":[4,2]})");
  EXPECT_EQ(read_generation_config(path_.string())->sampling_json(), R"({"top_k":3})");
  EXPECT_THAT((*text()).tokenizer->end_of_generation(), ElementsAre(4, 2));
  write("generation_config.json", R"({"eos_token_id":5})");
  EXPECT_THAT(text().status().message(), HasSubstr("token 5, which is to end answers, is outside the vocabulary of 5"));
}

TEST(GenerationConfig, OtherModelsHaveTheUsualValues) {
  EXPECT_EQ(read_generation_config("dummy:llama")->sampling_json(), "{}");
  EXPECT_EQ(read_generation_config("/nowhere/model.gguf")->sampling_json(), "{}");
}

}  // namespace
}  // namespace kvasir::model
