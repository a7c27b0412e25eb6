// Fields and routes that vLLM and SGLang have beside OpenAI's.
#include "tests/server/openai_fixture.h"

namespace kvasir::server {
namespace {

TEST_F(OpenAi, OnlyAllowedIdsReachTheEngine) {
  whole("/v1/completions", R"({"prompt":"a","allowed_token_ids":[3,5]})");
  EXPECT_EQ(engine_.last().allowed_tokens, (std::vector<int32_t>{3, 5}));
  whole("/v1/chat/completions", R"({"messages":[{"role":"user","content":"a"}],"allowed_token_ids":null})");
  EXPECT_TRUE(engine_.last().allowed_tokens.empty());
}

TEST_F(OpenAi, LogprobsOfIdsThatTheClientNames) {
  Json one = whole("/v1/chat/completions",
                   R"({"messages":[{"role":"user","content":"x"}],"logprobs":true,"top_logprobs":2,"max_tokens":1,
      "logprob_token_ids":[100,9],"return_tokens_as_token_ids":true})");
  EXPECT_EQ(engine_.last().sampling.logprob_token_ids, (std::vector<int32_t>{100, 9}));
  const Json& top = one["choices"][0]["logprobs"]["content"][0]["top_logprobs"];
  ASSERT_EQ(top.size(), 3u);
  EXPECT_EQ(top[0]["token"], "token_id:100");
  EXPECT_EQ(top[2]["token"], one["choices"][0]["logprobs"]["content"][0]["token"]);
  one = whole("/v1/completions", R"({"prompt":"ab","logprobs":0,"max_tokens":1,"logprob_token_ids":[99]})");
  EXPECT_EQ(one["choices"][0]["logprobs"]["top_logprobs"][0].size(), 2u);
  auto refused = [&](const char* field, const char* why) {
    expect_error(post("/v1/completions", cat(R"({"prompt":"a",)", field, '}')), 400, "logprob_token_ids", why);
  };
  refused(R"("logprob_token_ids":[1])", "set logprobs");
  refused(R"("logprobs":1,"logprob_token_ids":[257])", "257");
  refused(R"("logprobs":1,"logprob_token_ids":3)", "list");
  refused(R"("logprobs":1,"logprob_token_ids":[1],"use_beam_search":true)", "of draws");
  refused(R"("logprobs":1,"logprob_token_ids":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21])", "at most 20");
  expect_error(post("/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}],"logprob_token_ids":[1]})"),
               400, "logprob_token_ids", "logprobs: true");
}

TEST_F(OpenAi, BadWordsAreTheirTokensWithABlankBeforeAndWithout) {
  using Sequences = std::vector<std::vector<int32_t>>;
  whole("/v1/completions", R"({"prompt":"a","bad_words":["ab","c"]})");
  EXPECT_EQ(engine_.last().sampling.bad_sequences, (Sequences{{97, 98}, {32, 97, 98}, {99}, {32, 99}}));
  whole("/v1/chat/completions", R"({"messages":[{"role":"user","content":"a"}],"bad_words":"b"})");
  EXPECT_EQ(engine_.last().sampling.bad_sequences, (Sequences{{98}, {32, 98}}));
  whole("/v1/completions", R"({"prompt":"a","bad_words":[]})");
  EXPECT_TRUE(engine_.last().sampling.bad_sequences.empty());
  auto refused = [&](const char* field, const char* why) {
    expect_error(post("/v1/completions", cat(R"({"prompt":"a",)", field, '}')), 400, "bad_words", why);
  };
  refused(R"("bad_words":[""])", "empty");
  refused(R"("bad_words":[1])", "a list of strings");
  refused(R"("bad_words":["a"],"use_beam_search":true)", "of draws");
}

TEST_F(OpenAi, TheLastMessageGoesOn) {
  const char* messages =
      R"("messages":[{"role":"user","content":"x"},{"role":"assistant","content":[{"type":"text","text":"ab "}]}])";
  for (const char* more : {"", R"(,"add_generation_prompt":false)", R"(,"add_generation_prompt":null)"}) {
    const std::string body = cat('{', messages, R"(,"continue_final_message":true)", more);
    EXPECT_EQ(whole("/v1/chat/completions", body + "}")["choices"][0]["message"]["content"], "xab ") << more;
  }
  EXPECT_EQ(Json::parse(
                post("/tokenize", R"({"messages":[{"role":"assistant","content":"ab"}],"continue_final_message":true})")
                    .body)["tokens"],
            Json({'a', 'b'}));
  for (const char* path : {"/v1/chat/completions", "/tokenize"}) {
    RawClient::Answer a =
        post(path, cat('{', messages, R"(,"continue_final_message":true,"add_generation_prompt":true})"));
    expect_error(a, 400, "continue_final_message", "add_generation_prompt are both true");
  }
  expect_error(
      post("/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}],"continue_final_message":true})"),
      400, "continue_final_message", "user");
  EXPECT_EQ(post("/v1/completions", R"({"prompt":"x","continue_final_message":true})").status, 400);
}

TEST_F(OpenAi, TokensMayBeCalledByTheirIds) {
  Json chat = Json::parse(post("/v1/chat/completions", R"({"messages":[{"role":"user","content":"a"}],"max_tokens":2,
      "logprobs":true,"top_logprobs":1,"return_tokens_as_token_ids":true})")
                              .body);
  for (const Json& entry : chat["choices"][0]["logprobs"]["content"]) {
    EXPECT_TRUE(entry["token"].get<std::string>().starts_with("token_id:")) << entry;
    for (const Json& top : entry["top_logprobs"])
      EXPECT_TRUE(top["token"].get<std::string>().starts_with("token_id:")) << top;
  }
  Json completion = Json::parse(
      post("/v1/completions", R"({"prompt":"ab","max_tokens":2,"logprobs":1,"return_tokens_as_token_ids":true})").body);
  const Json& logprobs = completion["choices"][0]["logprobs"];
  ASSERT_EQ(logprobs["tokens"].size(), 2u) << completion;
  for (size_t i = 0; i < 2; ++i) {
    const std::string name = logprobs["tokens"][i];
    EXPECT_TRUE(name.starts_with("token_id:")) << name;
    EXPECT_TRUE(logprobs["top_logprobs"][i].contains(name)) << logprobs;
  }
}

TEST_F(OpenAi, AWholeAnswerSaysWhatWasNotAskedOfThePrompt) {
  const Json chat =
      Json::parse(post("/v1/chat/completions", R"({"messages":[{"role":"user","content":"a"}],"max_tokens":1})").body);
  const Json completion = Json::parse(post("/v1/completions", R"({"prompt":"a","max_tokens":1})").body);
  for (const Json& of : {chat, completion["choices"][0]})
    for (const char* name : {"prompt_token_ids", "prompt_logprobs"})
      EXPECT_TRUE(of.contains(name) && of[name].is_null()) << name << " of " << of;
}

TEST_F(OpenAi, AChatsLastMessageIsEchoed) {
  const std::string body = R"({"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"So"}],
      "max_tokens":2,"continue_final_message":true)";
  auto text = [&](const std::string& more) {
    return Json::parse(post("/v1/chat/completions", body + more + "}").body)["choices"][0]["message"]["content"]
        .get<std::string>();
  };
  const std::string plain = text("");
  EXPECT_EQ(text(R"(,"echo":true)"), "So" + plain);
  EXPECT_EQ(text(R"(,"echo":false)"), plain);
  std::string pieces;
  for (const Json& event : streamed("/v1/chat/completions", body + R"(,"echo":true,"stream":true})"))
    pieces += event["choices"][0]["delta"].value("content", "");
  EXPECT_EQ(pieces, "So" + plain);
}

TEST_F(OpenAi, SeveralConversationsAreOneCall) {
  const std::string two =
      R"({"messages":[[{"role":"user","content":"a"}],[{"role":"user","content":"b"}]],"max_tokens":2)";
  const Json answer = Json::parse(post("/v1/chat/completions/batch", two + R"(,"return_token_ids":true})").body);
  ASSERT_EQ(answer["choices"].size(), 2u) << answer;
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(answer["choices"][i]["index"], i);
    EXPECT_FALSE(answer["choices"][i]["message"]["content"].get<std::string>().empty());
    EXPECT_FALSE(answer["choices"][i]["prompt_token_ids"].empty());
  }
  EXPECT_NE(answer["choices"][0]["prompt_token_ids"], answer["choices"][1]["prompt_token_ids"]);
  EXPECT_EQ(answer["usage"]["completion_tokens"], 4);
  for (const auto& [more, named] : std::vector<std::pair<std::string, std::string>>{
           {R"(,"stream":true)", "stream"}, {R"(,"n":2)", "n "}, {R"(,"tools":[{}])", "tools"}}) {
    const auto refused = post("/v1/chat/completions/batch", two + more + "}");
    EXPECT_EQ(refused.status, 400) << more;
    EXPECT_NE(refused.body.find(named), std::string::npos) << refused.body;
  }
  const auto empty = post("/v1/chat/completions/batch", R"({"messages":[[]]})");
  EXPECT_EQ(empty.status, 400);
  EXPECT_NE(empty.body.find("messages[0]"), std::string::npos) << empty.body;
  EXPECT_EQ(post("/v1/chat/completions/batch", R"({"messages":[{"role":"user","content":"a"}]})").status, 400);
}

TEST_F(OpenAi, ALongPromptIsCut) {
  auto read = [&](const std::string& more) {
    const Json answer = Json::parse(
        post("/v1/completions", R"({"prompt":[97,98,99,100],"max_tokens":1,"return_token_ids":true)" + more + "}")
            .body);
    return answer["choices"][0]["prompt_token_ids"];
  };
  EXPECT_EQ(read(R"(,"truncate_prompt_tokens":2)"), Json({99, 100}));
  EXPECT_EQ(read(R"(,"truncate_prompt_tokens":3,"truncation_side":"right")"), Json({97, 98, 99}));
  EXPECT_EQ(read(R"(,"truncate_prompt_tokens":9)"), Json({97, 98, 99, 100}));
  EXPECT_EQ(read(R"(,"truncate_prompt_tokens":-1)"), Json({97, 98, 99, 100}));
  EXPECT_EQ(read(R"(,"truncate_prompt_tokens":null)"), Json({97, 98, 99, 100}));
  const std::string longer(20000, 'a');  // than the context
  EXPECT_EQ(post("/v1/completions", cat(R"({"prompt":")", longer, R"(","max_tokens":2})")).status, 400);
  const auto cut =
      post("/v1/completions", cat(R"({"prompt":")", longer, R"(","max_tokens":2,"truncate_prompt_tokens":-1})"));
  EXPECT_EQ(cut.status, 200) << cut.body;
  for (const auto& [more, named] :
       std::vector<std::pair<std::string, std::string>>{{R"(,"truncate_prompt_tokens":0)", "truncate_prompt_tokens"},
                                                        {R"(,"truncation_side":"left")", "truncation_side"}}) {
    const auto refused = post("/v1/completions", R"({"prompt":"a")" + more + "}");
    EXPECT_EQ(refused.status, 400);
    EXPECT_NE(refused.body.find(named), std::string::npos) << refused.body;
  }
}

TEST_F(OpenAi, InvocationsAreWhatTheirBodyHolds) {
  EXPECT_EQ(Json::parse(post("/invocations", R"({"prompt":"a","max_tokens":1})").body)["object"], "text_completion");
  EXPECT_EQ(Json::parse(
                post("/invocations", R"({"messages":[{"role":"user","content":"a"}],"max_tokens":1})").body)["object"],
            "chat.completion");
  const auto neither = post("/invocations", R"({"max_tokens":1})");
  EXPECT_EQ(neither.status, 400);
  EXPECT_NE(neither.body.find("messages"), std::string::npos) << neither.body;
}

}  // namespace
}  // namespace kvasir::server
