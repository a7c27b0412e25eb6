// Tools of OpenAI's chat: calls that are forced, held to a schema, cut, sent back; and what else an answer tells.
#include "tests/server/openai_fixture.h"

namespace kvasir::server {
namespace {

TEST_F(OpenAi, AForcedToolIsACall) {
  // The scripted engine says the prompt again, so the message is what the grammar would have allowed.
  const std::string tools = R"("tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}])";
  auto body = [&](std::string_view message, std::string_view choice, bool stream) {
    return cat(R"({"messages":[{"role":"user","content":)", Json(message).dump(), R"(}],"tool_choice":)", choice,
               ",\"stream\":", stream, ",", tools, "}");
  };
  const char* named = R"({"type":"function","function":{"name":"f"}})";
  Json one = whole("/v1/chat/completions", body(R"({"a": 1})", named, false));
  EXPECT_EQ(engine_.last().grammar.text, R"({"type":"object"})");
  Json call = one["choices"][0]["message"]["tool_calls"][0];
  EXPECT_EQ(call["function"]["name"], "f");
  EXPECT_EQ(Json::parse(call["function"]["arguments"].get<std::string>()), Json({{"a", 1}}));
  EXPECT_TRUE(one["choices"][0]["message"]["content"].is_null());

  std::string arguments, finish;
  for (const Json& e :
       streamed("/v1/chat/completions",
                body(R"(<tool_call>{"name":"f","arguments":{"b":[2]}}</tool_call>)", R"("required")", true))) {
    const Json& choice = e["choices"][0];
    if (choice["delta"].contains("tool_calls"))
      arguments += choice["delta"]["tool_calls"][0]["function"]["arguments"].get<std::string>();
    if (choice["finish_reason"].is_string()) finish = choice["finish_reason"];
  }
  EXPECT_EQ(Json::parse(arguments), Json({{"b", {2}}}));
  EXPECT_EQ(finish, "tool_calls");
  EXPECT_EQ(engine_.last().grammar.kind, text::GrammarSpec::Kind::tool_calls);
  EXPECT_EQ(Json::parse(engine_.last().grammar.text),
            Json::parse(R"({"form":"hermes","only":"some","tools":[{"name":"f","parameters":{"type":"object"}}]})"));

  one = whole("/v1/chat/completions", body("plain", R"("none")", false));
  EXPECT_EQ(engine_.last().grammar.kind, text::GrammarSpec::Kind::none);
  EXPECT_EQ(one["choices"][0]["message"]["content"], "plain");
}

// What stands around a forced call is nobody's text: an answer cut anywhere has a piece of its call, or nothing.
TEST_F(OpenAi, AForcedCallThatIsCutIsAPieceOfItself) {
  const std::string said = R"(<tool_call>{"name":"f","arguments":{"a": "b c"}}</tool_call>)",
                    arguments = R"({"a": "b c"})";
  for (const auto& [choice, text] :
       {std::pair(R"("required")", said), std::pair(R"({"type":"function","function":{"name":"f"}})", arguments)})
    for (size_t most = 0; most <= text.size(); ++most) {
      Json one = whole("/v1/chat/completions",
                       cat(R"({"messages":[{"role":"user","content":)", Json(text).dump(), R"(}],"max_tokens":)", most,
                           R"(,"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":)", choice, "}"));
      const Json& message = one["choices"][0]["message"];
      if (!message.contains("tool_calls")) {
        EXPECT_EQ(message["content"], "") << choice << most;
        continue;
      }
      EXPECT_TRUE(message["content"].is_null()) << choice << most << message;
      const std::string called = message["tool_calls"][0]["function"]["arguments"];
      EXPECT_TRUE(arguments.starts_with(called)) << choice << most << called;
      // And goes back as it came.
      whole("/v1/chat/completions",
            Json{{"messages", {{{"role", "user"}, {"content", "x"}}, message}}, {"max_tokens", 1}}.dump());
    }
}

TEST_F(OpenAi, SeveralCallsMayBeRequired) {
  const std::string call = R"(<tool_call>{"name":"f","arguments":{}}</tool_call>)";
  for (const bool parallel : {true, false}) {
    Json one = whole("/v1/chat/completions", cat(R"({"messages":[{"role":"user","content":)", Json(call + call).dump(),
                                                 R"(}],"tool_choice":"required","parallel_tool_calls":)", parallel,
                                                 R"(,"tools":[{"type":"function","function":{"name":"f"}}]})"));
    EXPECT_EQ(one["choices"][0]["message"]["tool_calls"].size(), parallel ? 2u : 1u);
    EXPECT_EQ(Json::parse(engine_.last().grammar.text)["only"], parallel ? "some" : "one");
  }
}

// What is not listed is not there, for tools that are held to their schema and unless an answer's is loose.
TEST_F(OpenAi, UnlistedKeysAreNotInvented) {
  const std::string open = R"({"type":"object","properties":{"a":{"type":"object","properties":{"b":{}}}}})",
                    closed = R"({"type":"object","properties":{"a":{"type":"object","properties":{"b":{}},)"
                             R"("additionalProperties":false}},"additionalProperties":false})";
  auto format = [&](const char* strict) {
    whole("/v1/completions", cat(R"({"prompt":"a","response_format":{"type":"json_schema","json_schema":{"name":"x",)",
                                 strict, R"("schema":)", open, "}}}"));
    return engine_.last().grammar.text;
  };
  EXPECT_EQ(format(R"("strict":true,)"), closed);
  EXPECT_EQ(format(""), closed);
  EXPECT_EQ(format(R"("strict":null,)"), closed);
  EXPECT_EQ(format(R"("strict":false,)"), open);
  whole("/v1/chat/completions",
        cat(R"({"messages":[{"role":"user","content":"x"}],"tool_choice":{"type":"function","function":{"name":"f"}},)",
            R"("tools":[{"type":"function","function":{"name":"f","parameters":)", open, "}}]}"));
  EXPECT_EQ(engine_.last().grammar.text, closed);
  // Said is said, and schemas that list together are left to each other.
  for (const char* same : {R"({"properties":{"a":{}},"additionalProperties":true})",
                           R"({"allOf":[{"properties":{"a":{}}},{"properties":{"b":{}}}]})",
                           R"({"properties":{"a":{}},"$ref":"#/$defs/x"})", R"({"type":"object"})"}) {
    whole("/v1/completions",
          cat(R"({"prompt":"a","response_format":{"type":"json_schema","json_schema":{"strict":true,"schema":)", same,
              "}}}"));
    EXPECT_EQ(engine_.last().grammar.text, same);
  }
}

// As official clients and their wrappers send an answer back.
TEST_F(OpenAi, HistoryComesBackAsClientsKeepIt) {
  whole("/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"},{"role":"assistant","content":"y",
      "parsed":{"a":1},"refusal":null,"annotations":[],"provider_specific_fields":{"z":null},"reasoning":"r",
      "thinking_blocks":[{"type":"thinking"}],"images":null,"function_call":null,"audio":null,"tool_calls":null}],
      "use_beam_search":false,"echo":false,"length_penalty":1.0,"suffix":null,"spaces_between_special_tokens":true})");
  expect_error(post("/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}],"length_penalty":2})"), 400,
               "length_penalty", "use_beam_search");
}

TEST_F(OpenAi, OneConstraintUnderTwoNamesIsOne) {
  whole("/v1/completions", R"({"prompt":"a","guided_regex":"a+","structured_outputs":{"regex":"a+"},"regex":"a+"})");
  EXPECT_EQ(engine_.last().grammar.text, "a+");
}

TEST_F(OpenAi, WhatElseAnAnswerTells) {
  Json one = whole("/v1/completions", R"({"prompt":"ab","max_tokens":4,"return_token_ids":true,"prompt_logprobs":1,
      "stop_token_ids":[98],"rid":"mine"})");
  EXPECT_EQ(engine_.last().id, "mine");
  const Json& choice = one["choices"][0];
  EXPECT_EQ(choice["token_ids"], Json({97, 98}));
  EXPECT_EQ(choice["prompt_token_ids"], Json({97, 98}));
  EXPECT_EQ(choice["stop_reason"], 98);
  EXPECT_EQ(choice["matched_stop"], 98);
  EXPECT_EQ(choice["prompt_logprobs"],
            Json::parse(R"([null,{"98":{"logprob":-0.5,"rank":null,"decoded_token":"b"}}])"));
  EXPECT_TRUE(one["system_fingerprint"].get<std::string>().starts_with("build-kvasir-"));
  one = whole("/v1/chat/completions", R"({"messages":[{"role":"user","content":"ab"}],"return_token_ids":true})");
  EXPECT_EQ(one["prompt_token_ids"], Json({97, 98}));
  EXPECT_TRUE(one["choices"][0]["stop_reason"].is_null());  // the model's own end
  EXPECT_EQ(one["choices"][0]["matched_stop"], 256);
  std::vector<int> ids;
  for (const Json& e : streamed("/v1/completions", R"({"prompt":"ab","return_token_ids":true,"stream":true})")) {
    if (e["choices"][0].contains("prompt_token_ids")) {
      EXPECT_EQ(e["choices"][0]["prompt_token_ids"], Json({97, 98}));
    }
    for (int id : e["choices"][0].value("token_ids", Json::array())) ids.push_back(id);
  }
  EXPECT_EQ(ids, (std::vector<int>{97, 98, 256}));
}

TEST_F(OpenAi, AClientsNameForItsRequestIsKept) {
  RawClient::Answer a = post("/v1/completions", R"({"prompt":"a"})", "X-Request-Id: my-7\r\n");
  EXPECT_NE(a.head.find("X-Request-Id: my-7\r\n"), std::string::npos) << a.head;
  EXPECT_EQ(engine_.last().id, "my-7");
  EXPECT_EQ(Json::parse(a.body)["id"], "cmpl-my-7");
}

TEST_F(OpenAi, TheRoleChunkCountsNoTokens) {
  auto events = streamed("/v1/chat/completions", R"({"messages":[{"role":"user","content":"hey"}],"stream":true,
      "stream_options":{"include_usage":true,"continuous_usage_stats":true}})");
  EXPECT_EQ(events[0]["usage"]["completion_tokens"], 0);
  EXPECT_EQ(events[1]["usage"]["completion_tokens"], 1);
}

TEST_F(OpenAi, ThoughtsAreToldFromTheAnswer) {
  const std::string said = "<think>\nwhy\n</think>\n\nso";
  const std::string body = cat(R"({"messages":[{"role":"user","content":)", Json(said).dump(), "}]");
  EXPECT_EQ(whole("/v1/chat/completions", body + "}")["choices"][0]["message"]["content"], said);  // no such model
  engine_.use_template("{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}");
  const Json message = whole("/v1/chat/completions", body + "}")["choices"][0]["message"];
  EXPECT_EQ(message["content"], "so");
  EXPECT_EQ(message["reasoning_content"], "\nwhy\n");
  std::string thought, content;
  for (const Json& e : streamed("/v1/chat/completions", body + R"(,"stream":true})")) {
    const Json& delta = e["choices"][0]["delta"];
    thought += delta.value("reasoning_content", "");
    content += delta.value("content", "");
  }
  EXPECT_EQ(thought, "\nwhy\n");
  EXPECT_EQ(content, "so");
}

// A format is of the text, and where calls are forced there is none.
TEST_F(OpenAi, AForcedCallBesideAFormat) {
  const std::string tools = R"("tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"required")";
  const std::string body = cat(R"({"messages":[{"role":"user","content":"x"}],)", tools, ',');
  for (const char* format : {R"({"type":"json_object"})", R"({"type":"json_schema","json_schema":{"schema":{}}})"}) {
    whole("/v1/chat/completions", cat(body, R"("response_format":)", format, '}'));
    EXPECT_EQ(engine_.last().grammar.kind, text::GrammarSpec::Kind::tool_calls);
  }
  expect_error(post("/v1/chat/completions", body + R"("regex":"a+"})"), 400, "tool_choice", "another constraint");
  whole("/v1/responses", R"({"input":"x","tools":[{"type":"function","name":"f"}],"tool_choice":"required",
      "text":{"format":{"type":"json_object"}}})");
  EXPECT_EQ(engine_.last().grammar.kind, text::GrammarSpec::Kind::tool_calls);
}

// vLLM's field: thoughts that are not wanted are not sent, and counted all the same.
TEST_F(OpenAi, ThoughtsThatAreNotWanted) {
  engine_.use_template("{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}");
  const std::string body = R"({"messages":[{"role":"user","content":"<think>why</think>so"}],"include_reasoning":)";
  const Json shown = whole("/v1/chat/completions", body + "true}"),
             hidden = whole("/v1/chat/completions", body + "false}");
  EXPECT_EQ(shown["choices"][0]["message"]["reasoning_content"], "why");
  EXPECT_FALSE(hidden["choices"][0]["message"].contains("reasoning_content"));
  EXPECT_EQ(hidden["choices"][0]["message"]["content"], "so");
  EXPECT_GT(hidden["usage"]["completion_tokens_details"]["reasoning_tokens"].get<int>(), 0);
  EXPECT_EQ(shown["usage"], hidden["usage"]);
  std::string content;
  for (const Json& e : streamed("/v1/chat/completions", body + R"(false,"stream":true})")) {
    const Json& delta = e["choices"][0]["delta"];
    EXPECT_FALSE(delta.contains("reasoning_content"));
    content += delta.value("content", "");
  }
  EXPECT_EQ(content, "so");
  for (const char* tells : {"logprobs", "return_token_ids"}) {  // the thoughts' tokens
    expect_error(post("/v1/chat/completions", cat(body, R"(false,")", tells, R"(":true})")), 400, "include_reasoning",
                 cat(tells, " would tell"));
    whole("/v1/chat/completions", cat(body, R"(true,")", tells, R"(":true})"));
    whole("/v1/chat/completions", cat(body, R"(false,")", tells, R"(":false})"));
  }
}

TEST_F(OpenAi, AForcedCallOfAToolWithoutParametersHasNone) {
  for (const char* none : {"", R"(,"parameters":null)"}) {
    whole("/v1/chat/completions",
          cat(R"({"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f")", none,
              R"(}}],"tool_choice":{"type":"function","function":{"name":"f"}}})"));
    EXPECT_EQ(engine_.last().grammar.text, R"({"type":"object","additionalProperties":false})");
  }
}

TEST_F(OpenAi, OneStrictToolHoldsTheCallsTheModelMayMake) {
  using Kind = text::GrammarSpec::Kind;
  const std::string schema = R"({"type":"object","properties":{"n":{"type":"integer"}}})";
  auto grammar = [&](const std::string& strict, const std::string& more) {
    whole("/v1/chat/completions",
          cat(R"({"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f",)",
              strict, R"("parameters":)", schema, R"(}},{"type":"function","function":{"name":"g","parameters":)",
              schema, "}}]", more, "}"));
    return engine_.last().grammar;
  };
  const std::string closed = R"({"type":"object","properties":{"n":{"type":"integer"}},"additionalProperties":false})";
  const std::string held = cat(R"({"form":"hermes","tools":[{"name":"f","parameters":)", closed,
                               R"(},{"name":"g","parameters":{"type":"object"}}])");
  text::GrammarSpec g = grammar(R"("strict":true,)", R"(,"tool_choice":"auto")");
  EXPECT_EQ(g.kind, Kind::tool_calls);
  EXPECT_EQ(g.text, held + "}");
  EXPECT_EQ(grammar(R"("strict":false,)", "").kind, Kind::none);
  EXPECT_EQ(grammar("", "").kind, Kind::none);
  EXPECT_EQ(grammar(R"("strict":true,)", R"(,"tool_choice":"none")").kind, Kind::none);
  // Beside a format of the answer: a call, or that.
  EXPECT_EQ(grammar(R"("strict":true,)", R"(,"response_format":{"type":"json_object"})").text,
            held + R"(,"answer":{"type":"object"}})");
  EXPECT_EQ(grammar(R"("strict":true,)", R"(,"guided_json":{"type":"null"})").text,
            held + R"(,"answer":{"type":"null"}})");
  EXPECT_EQ(grammar(R"("strict":true,)", R"(,"guided_regex":"a")").kind, Kind::regex);
  EXPECT_EQ(grammar(R"("strict":null,)", "").kind, Kind::none);
  expect_error(post("/v1/chat/completions",
                    R"({"messages":[{"role":"user","content":"x"}],
                        "tools":[{"type":"function","function":{"name":"f","strict":"yes"}}]})"),
               400, "tools", "strict must be true or false");
}

// gpt-oss says everything in messages of its own: thoughts, what is said, calls.
TEST_F(OpenAi, HarmonyIsFoundByTheTemplate) {
  engine_.use_template("{% for m in messages %}{{ m.content }}{% endfor %}{# tools <|channel|><|message|> #}");
  const std::string said =
      "<|channel|>analysis<|message|>hm<|end|><|start|>assistant "
      "to=functions.f<|channel|>commentary<|message|>{}<|call|>";
  Json message = whole("/v1/chat/completions",
                       cat(R"({"messages":[{"role":"user","content":)", Json(said).dump(),
                           R"(}],"tools":[{"type":"function","function":{"name":"f"}}]})"))["choices"][0]["message"];
  EXPECT_EQ(message["reasoning_content"], "hm");
  EXPECT_EQ(message["tool_calls"][0]["function"]["name"], "f");
  EXPECT_EQ(message["tool_calls"][0]["function"]["arguments"], "{}");
  EXPECT_FALSE(engine_.last().skip_special);
}

// What the operator says of a model whose template does not show it.
class Operators : public OpenAi {
 protected:
  void configure(ServerOptions& o) override {
    o.tool_parser = "glm", o.reasoning_parser = "think";
    o.any_model_name = true;
  }
};

TEST_F(Operators, NameTheSyntaxOfCallsAndThoughts) {
  const std::string said = "<think>hm</think>Now. <tool_call>f<arg_key>z</arg_key><arg_value>1</arg_value></tool_call>";
  auto body = [&](std::string_view more) {
    return cat(R"({"model":"whatever","messages":[{"role":"user","content":)", Json(said).dump(),
               R"(}],"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object",
               "properties":{"z":{"type":"string"}}}}}])",
               more, "}");
  };
  Json message = whole("/v1/chat/completions", body(""))["choices"][0]["message"];
  EXPECT_EQ(message["reasoning_content"], "hm");
  EXPECT_EQ(message["content"], "Now.");
  EXPECT_EQ(message["tool_calls"][0]["function"]["name"], "f");
  EXPECT_EQ(message["tool_calls"][0]["function"]["arguments"], R"({"z":"1"})");
  std::string finish;
  int calls = 0;
  for (const Json& e : streamed("/v1/chat/completions", body(R"(,"stream":true)"))) {
    const Json& choice = e["choices"][0];
    calls += choice["delta"].contains("tool_calls");
    if (choice["finish_reason"].is_string()) finish = choice["finish_reason"];
  }
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(finish, "tool_calls");
  // A call that is required is held to the family's own syntax, of which the grammar is told what is bare text.
  whole("/v1/chat/completions", body(R"(,"tool_choice":"required","max_tokens":1)"));
  EXPECT_EQ(Json::parse(engine_.last().grammar.text),
            Json::parse(R"({"form":"glm","tools":[{"name":"f","parameters":{"type":"object","properties":
                {"z":{"type":"string"}},"additionalProperties":false},"texts":["z"]}],"only":"some"})"));
}

// Where that syntax cannot hold a tool, a call that is asked for is written as Hermes writes it.
TEST_F(Operators, HoldCallsInASyntaxThatCan) {
  auto form = [&](const char* schema, const char* choice) {
    whole("/v1/chat/completions", cat(R"({"messages":[{"role":"user","content":"x"}],"max_tokens":1,"tool_choice":)",
                                      choice, R"(,"tools":[{"type":"function","function":{"name":"f","strict":true,)",
                                      R"("parameters":)", schema, "}}]}"));
    return engine_.last().grammar;
  };
  using Kind = text::GrammarSpec::Kind;
  const char *joined = R"({"oneOf":[{"type":"object"}]})", *plain = R"({"type":"object","properties":{"a":{}}})",
             *named = R"({"type":"function","function":{"name":"f"}})";
  EXPECT_EQ(Json::parse(form(joined, R"("required")").text)["form"], "hermes");
  EXPECT_EQ(form(joined, named).kind, Kind::json_schema);
  EXPECT_EQ(form(joined, R"("auto")").kind, Kind::none);
  EXPECT_EQ(Json::parse(form(plain, named).text)["form"], "glm");
  EXPECT_EQ(Json::parse(form(plain, named).text)["only"], "one");
  EXPECT_EQ(Json::parse(form(plain, R"("auto")").text)["form"], "glm");
}

// Kimi's tags are special tokens, which an answer then shows; the call that was named is read in its syntax.
TEST_F(OpenAi, ANamedCallInAFamilysOwnSyntax) {
  engine_.use_template("{% for m in messages %}{{ m.content }}{% endfor %}{# tools <|tool_calls_section_begin|> #}");
  engine_.set_context(1000);
  const std::string said =
      "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"a\": 1}"
      "<|tool_call_end|><|tool_calls_section_end|>";
  const Json choice = whole(
      "/v1/chat/completions",
      cat(R"({"messages":[{"role":"user","content":)", Json(said).dump(),
          R"(}],"tool_choice":{"type":"function","function":{"name":"f"}},"tools":[{"type":"function","function":)",
          R"({"name":"f","parameters":{"type":"object"}}},{"type":"function","function":{"name":"g"}}]})"))["choices"]
                                                                                                           [0];
  EXPECT_EQ(choice["message"]["tool_calls"][0]["function"]["arguments"], "{\"a\":1}");
  EXPECT_EQ(choice["finish_reason"], "stop");
  EXPECT_EQ(Json::parse(engine_.last().grammar.text),
            Json::parse(R"({"form":"kimi","tools":[{"name":"f","parameters":{"type":"object"}}],"only":"one"})"));
  EXPECT_FALSE(engine_.last().skip_special);
}

TEST_F(Operators, TakeAnyNameOfTheModel) {
  EXPECT_EQ(whole("/v1/completions", R"({"model":"gpt-9","prompt":"hi"})")["model"], "fake");
  EXPECT_EQ(ask(RawClient::get("/v1/models/gpt-9")).status, 200);
}

}  // namespace
}  // namespace kvasir::server
