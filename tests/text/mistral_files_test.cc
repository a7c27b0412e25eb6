// Mistral's real tokenizer files, out of mistral-common's wheel (mistral_files.sh fetches it): ids identical to
// mistral-common's on the 10,000 strings (make_mistral.py).
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <sstream>

#include "model/formats/mistral_vocab.h"
#include "tests/text/stored_ids.h"

namespace kvasir::text {
namespace {

using nlohmann::json;

Result<TokenizerPtr> load(const std::string& name, const std::string& bytes) {
  if (name.find(".json") == std::string::npos) {
    KVASIR_ASSIGN(const GgufVocab vocab, model::vocab_from_sentencepiece(bytes, name));
    return Tokenizer::from_gguf(vocab);
  }
  KVASIR_ASSIGN(const model::Tekken made, model::read_tekken(bytes, name));
  return Tokenizer::from_json(made.tokenizer_json, R"({"bos_token": "<s>", "eos_token": "</s>"})");
}

TEST(MistralFiles, HaveMistralCommonsIds) {
  const char* folder = std::getenv("KVASIR_MISTRAL_FILES");
  if (!folder) GTEST_SKIP() << "skipped: KVASIR_MISTRAL_FILES names no folder (tests/text/mistral_files.sh)";
  const json files = stored("mistral_files");
  for (const auto& [name, file] : files.items()) {
    SCOPED_TRACE(name);
    std::ifstream in(std::string(folder) + "/" + name, std::ios::binary);
    ASSERT_TRUE(in) << "is not in " << folder;
    std::stringstream bytes;
    bytes << in.rdbuf();
    const std::clock_t begin = std::clock();
    const auto t = load(name, bytes.str());
    const double seconds = double(std::clock() - begin) / CLOCKS_PER_SEC;
    ASSERT_TRUE(t.ok()) << t.status().message();
    std::printf("%s: %d tokens, read in %.2f s of a processor\n", name.c_str(), (*t)->vocab_size(), seconds);
    EXPECT_EQ((*t)->vocab_size(), file["tokens"]);
    for (const auto& [token, id] : file["special"].items()) {
      EXPECT_EQ((*t)->token_id(token), id) << token;
      EXPECT_TRUE((*t)->is_special(id)) << token;
    }
    EXPECT_EQ((*t)->bos(), 1);
    EXPECT_EQ((*t)->end_of_generation(), std::vector<int32_t>{2});
    expect_stored_ids(**t, file["hashes"]);
  }
}

}  // namespace
}  // namespace kvasir::text
