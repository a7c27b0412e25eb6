// Chats of Mistral's folders: the ids that mistral-common makes of them by each version of its tokenizers
// (make_mistral_chats.py), with small vocabularies and, in ./test long, with its real files.
#include "model/text/mistral_template.h"

#include <gmock/gmock.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "model/formats/mistral_vocab.h"
#include "model/text/reasoning_parser.h"
#include "model/text/tool_parser.h"
#include "tests/text/stored_ids.h"

namespace kvasir::text {
namespace {

using nlohmann::ordered_json;
using testing::HasSubstr;

const ordered_json& chats() {
  static const ordered_json all = [] {
    std::ifstream in("tests/text/data/mistral_chats.json");
    return ordered_json::parse(in);
  }();
  return all;
}

TokenizerPtr of_sentence_piece(const std::string& bytes) {
  const auto vocab = model::vocab_from_sentencepiece(bytes, "tokenizer.model");
  EXPECT_TRUE(vocab.ok()) << vocab.status().message();
  auto made = Tokenizer::from_gguf(*vocab);
  EXPECT_TRUE(made.ok());
  return *made;
}

TokenizerPtr of_tekken(const std::string& bytes) {
  const auto json = model::read_tekken(bytes, "tekken.json");
  EXPECT_TRUE(json.ok()) << json.status().message();
  auto made = Tokenizer::from_json(json->tokenizer_json, R"({"bos_token": "<s>", "eos_token": "</s>"})");
  EXPECT_TRUE(made.ok());
  return *made;
}

TokenizerPtr small_tokenizer(const ordered_json& one) {
  if (one["version"] == "v1") return of_sentence_piece(from_base64(stored("mistral")["spm"]["file"]));  // without tags
  if (!one.contains("tekken")) return of_sentence_piece(from_base64(chats()["spm"]));
  nlohmann::json file = nlohmann::json::parse(stored("mistral")["tekken"]["file"].get<std::string>());
  nlohmann::json& config = file["config"];
  config["version"] = one["version"];
  config["default_vocab_size"] =
      config["default_vocab_size"].get<int>() + 40 - config["default_num_special_tokens"].get<int>();
  config["default_num_special_tokens"] = 40;
  file["special_tokens"] = nlohmann::json::parse(one["tekken"]["special_tokens"].dump());
  return of_tekken(file.dump());
}

int number(const ordered_json& version) { return std::stoi(version.get<std::string>().substr(1)); }

// The text, and its ids.
std::pair<std::string, std::vector<int32_t>> made(const Tokenizer& tokenizer, int version, const ordered_json& chat) {
  const bool thinks = tokenizer.token_id("[THINK]") >= 0;
  auto compiled = ChatTemplate::compile(mistral_template(version, thinks), tokenizer);
  EXPECT_TRUE(compiled.ok()) << compiled.status().message();
  if (!compiled.ok()) return {};
  const auto text =
      (*compiled)->render(chat["messages"].dump(), chat["tools"].is_null() ? "" : chat["tools"].dump(), true);
  EXPECT_TRUE(text.ok()) << text.status().message();
  if (!text.ok()) return {};
  return {*text, *tokenizer.encode(*text, false, true)};
}

TEST(MistralTemplate, HasMistralCommonsIds) {
  for (const ordered_json& one : chats()["small"]) {
    SCOPED_TRACE(one["version"].get<std::string>() + (one.contains("tekken") ? " of tekken" : ""));
    const TokenizerPtr tokenizer = small_tokenizer(one);
    int compared = 0;
    for (size_t i = 0; i < chats()["chats"].size(); ++i) {
      if (one["ids"][i].is_null()) continue;  // its version has no such thing
      const auto [text, ids] = made(*tokenizer, number(one["version"]), chats()["chats"][i]);
      const auto want = one["ids"][i].get<std::vector<int32_t>>();
      EXPECT_EQ(ids, want) << chats()["chats"][i]["name"] << "\n" << text << "\n" << *tokenizer->decode(want, false);
      ++compared;
    }
    EXPECT_GE(compared, 8);
  }
}

TEST(MistralTemplate, HasThemByTheRealFiles) {
  const char* folder = std::getenv("KVASIR_MISTRAL_FILES");
  if (!folder) GTEST_SKIP() << "KVASIR_MISTRAL_FILES names no folder (tests/text/mistral_files.sh)";
  for (const ordered_json& one : chats()["real"]) {
    const std::string name = one["file"];
    SCOPED_TRACE(name);
    std::ifstream in(std::string(folder) + "/" + name, std::ios::binary);
    ASSERT_TRUE(in) << "is not in " << folder;
    std::stringstream bytes;
    bytes << in.rdbuf();
    const TokenizerPtr tokenizer = name.ends_with(".json") ? of_tekken(bytes.str()) : of_sentence_piece(bytes.str());
    for (size_t i = 0; i < chats()["chats"].size(); ++i) {
      if (one["hashes"][i].is_null()) continue;
      const auto [text, ids] = made(*tokenizer, number(one["version"]), chats()["chats"][i]);
      EXPECT_EQ(crc24(ids), one["hashes"][i]) << chats()["chats"][i]["name"] << "\n" << text;
    }
  }
}

TEST(MistralTemplate, ItsCallsAndThoughtsAreFound) {
  for (const int version : {2, 3, 7, 11, 13}) {
    EXPECT_EQ(tool_format_of(mistral_template(version, true)), ToolFormat::mistral) << version;
    EXPECT_EQ(reasoning_format_of(mistral_template(version, true)),
              version < 13 ? ReasoningFormat::none : ReasoningFormat::mistral);
    EXPECT_EQ(reasoning_format_of(mistral_template(version, false)), ReasoningFormat::none);
  }
  EXPECT_EQ(tool_format_of(mistral_template(1, false)), ToolFormat::none);
  // Then tools are described to it, and calls and results written out (server/described_tools.h, written_calls.h).
  for (const char* word : {"tools", "tool_calls", "'tool'"})
    EXPECT_EQ(mistral_template(1, false).find(word), std::string::npos) << word;
  for (const int version : {0, 4, 15}) EXPECT_EQ(mistral_template(version, true), "");
}

TEST(MistralTemplate, WhatItCannotSayIsRefused) {
  const TokenizerPtr tokenizer = of_sentence_piece(from_base64(chats()["spm"]));
  for (const int version : {1, 3, 13}) {
    auto compiled = ChatTemplate::compile(mistral_template(version, true), *tokenizer);
    ASSERT_TRUE(compiled.ok());
    EXPECT_THAT((*compiled)->render(R"([{"role": "bard", "content": "x"}])", "", true).status().message(),
                HasSubstr("role is bard"));
    EXPECT_THAT((*compiled)
                    ->render(R"([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}])", "", true)
                    .status()
                    .message(),
                HasSubstr("part of type image_url"));
  }
}

}  // namespace
}  // namespace kvasir::text
