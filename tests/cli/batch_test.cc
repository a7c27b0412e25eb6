// kvasir batch: a file of requests answered, gone on with, and refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "core/cat.h"
#include "tests/cli/shell.h"
#include "tests/scratch.h"

namespace kvasir::cli {
namespace {

using nlohmann::json;
using testing::HasSubstr;

class Batch : public testing::Test {
 protected:
  std::string write(const std::string& text) {
    std::ofstream(requests_) << text;
    return requests_;
  }
  Ran run(const std::string& more = "") {
    return shell(
        cat("batch --model dummy:llama,layers=1,hidden=64,heads=1,kv_heads=1,head_dim=64,ffn=64,vocab=260 "
            "--kv-memory 4MiB --threads 1 ",
            requests_, " --output ", answers_, " ", more));
  }
  std::map<std::string, json> answers() {
    std::map<std::string, json> out;
    std::ifstream in(answers_);
    for (std::string line; std::getline(in, line);) {
      json j = json::parse(line);
      EXPECT_FALSE(out.contains(j["custom_id"])) << line;
      out[j["custom_id"]] = j["response"];
    }
    return out;
  }
  static std::string line(const std::string& id, const std::string& url, const std::string& body) {
    return cat(R"({"custom_id":")", id, R"(","method":"POST","url":")", url, R"(","body":)", body, "}\n");
  }

  ScratchFolder scratch_;
  const std::string requests_ = scratch_.path("requests.jsonl"), answers_ = scratch_.path("answers.jsonl");
};

constexpr const char* kText =
    R"({"prompt":[1,2,3],"max_tokens":4,"temperature":0,"ignore_eos":true,"return_token_ids":true})";

TEST_F(Batch, EachRequestHasItsAnswer) {
  std::string all;
  for (int i = 0; i < 40; ++i) all += line(cat("r", i), "/v1/completions", kText);
  all += line("n", "/v1/completions", R"({"prompt":[4,5],"n":8,"max_tokens":2,"ignore_eos":true})");
  all += "\n" + line("e", "/v1/embeddings", R"({"input":[[1,2],[3]]})");
  write(all);
  const Ran ran = run();
  EXPECT_EQ(ran.code, 0) << ran.out;
  EXPECT_THAT(ran.out, HasSubstr("42 answers"));
  auto out = answers();
  ASSERT_EQ(out.size(), 42u);
  const json first = out["r0"]["body"]["choices"][0];
  EXPECT_EQ(first["token_ids"].size(), 4u);
  for (int i = 0; i < 40; ++i) {
    EXPECT_EQ(out[cat("r", i)]["status_code"], 200);
    EXPECT_EQ(out[cat("r", i)]["body"]["choices"][0]["token_ids"], first["token_ids"]);
  }
  EXPECT_EQ(out["n"]["body"]["choices"].size(), 8u);
  EXPECT_EQ(out["e"]["body"]["data"].size(), 2u);
}

TEST_F(Batch, WhatIsAnsweredIsNotAskedAgain) {
  write(line("a", "/v1/completions", kText) + line("b", "/v1/completions", kText));
  EXPECT_EQ(run().code, 0);
  // One line is whole, one was being written when the process ended.
  std::string kept;
  std::getline(std::ifstream(answers_), kept);
  std::ofstream(answers_) << kept << "\n{\"custom_id\":";
  const json whole = json::parse(kept);  // of whichever was answered first
  Ran ran = run();
  EXPECT_EQ(ran.code, 0) << ran.out;
  EXPECT_THAT(ran.out, HasSubstr("1 answers"));
  EXPECT_THAT(ran.out, HasSubstr("(1 were there)"));
  EXPECT_EQ(answers().size(), 2u);
  EXPECT_TRUE(answers().contains(whole["custom_id"] == "a" ? "b" : "a"));
  EXPECT_EQ(answers()[whole["custom_id"]], whole["response"]);
  EXPECT_THAT(run("--again").out, HasSubstr("2 answers"));
  EXPECT_EQ(answers().size(), 2u);

  std::ofstream(answers_) << "{\"another\":1}\n";
  EXPECT_THAT(run().out, HasSubstr("is no output of a batch"));
}

TEST_F(Batch, ARequestThatIsRefusedHasItsReason) {
  write(line("good", "/v1/completions", kText) + line("bad", "/v1/completions", R"({"prompt":[1],"temperature":-1})") +
        line("name", "/v1/completions", R"({"prompt":[1],"model":"gpt"})"));
  const Ran ran = run();
  EXPECT_EQ(ran.code, 1);
  EXPECT_THAT(ran.out, HasSubstr("2 of 3 requests were refused"));
  auto out = answers();
  EXPECT_EQ(out["good"]["status_code"], 200);
  EXPECT_EQ(out["bad"]["status_code"], 400);
  EXPECT_EQ(out["bad"]["body"]["error"]["param"], "temperature");
  EXPECT_EQ(out["name"]["status_code"], 404);
  EXPECT_EQ(run("--again --any-model-name").code, 1);
  EXPECT_EQ(answers()["name"]["status_code"], 200);
}

TEST_F(Batch, AMistakeInTheFileIsFoundBeforeAnythingIsAsked) {
  const std::string good = line("a", "/v1/completions", kText);
  for (const auto& [text, says] : std::vector<std::pair<std::string, const char*>>{
           {good + "{", "line 2: it is not a JSON object"},
           {good + good, "line 2: custom_id 'a' is an earlier line's"},
           {good + line("b", "/v1/audio", "{}"), "line 2: url is '/v1/audio'; it must be one of /v1/chat/completions"},
           {line("b", "/v1/completions", R"({"prompt":"x","stream":true})"), "line 1: stream is true"},
           {line("b", "/v1/completions", "3"), "body must be an object"},
           {R"({"url":"/v1/completions","body":{}})", "custom_id is missing"},
           {R"({"custom_id":7,"url":"/v1/completions","body":{}})", "custom_id must be a string"},
           {R"({"custom_id":"a","method":"GET","url":"/v1/completions","body":{}})", "method must be"},
           {R"({"custom_id":"a","url":"/v1/completions","body":{},"extra":1})", "\"extra\" is none of"},
           {"\n", "has no request"}}) {
    write(text);
    const Ran ran = run();
    EXPECT_EQ(ran.code, 1);
    EXPECT_THAT(ran.out, HasSubstr(says));
    EXPECT_FALSE(std::ifstream(answers_).good());
  }
  EXPECT_THAT(shell("batch --model dummy: /nowhere.jsonl").out, HasSubstr("cannot be read"));
  EXPECT_THAT(shell("batch --model dummy: a b").out, HasSubstr("one file of requests"));
  EXPECT_THAT(shell("generate --model dummy: --file " + write(good)).out, HasSubstr("kvasir batch answers it"));
}

}  // namespace
}  // namespace kvasir::cli
