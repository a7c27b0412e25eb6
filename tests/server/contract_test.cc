// Each line of the contract's list of bad input (docs/wire.md, "Limits and bad input") on each protocol it applies to.
#include <cmath>
#include <filesystem>

#include "server/keys.h"
#include "tests/server/contract_fixture.h"

namespace kvasir::server {
namespace {

class Contract : public ContractFixture {
 protected:
  template <class F>
  Outcome v1(F change) {
    V1 r = v1_request();
    change(r);
    return send(r);
  }
  template <class F>
  Outcome ppl(F change) {
    Ppl r = ppl_request();
    change(r);
    return send(r);
  }
  template <class F>
  Outcome vllm(F change) {
    Vllm r = vllm_request();
    change(r);
    return send(r);
  }
  template <class F>
  Outcome native(F change) {
    Native r = native_request();
    change(r);
    return send(r);
  }
  template <class F>
  Outcome kserve(F change) {
    Infer r = infer_request();
    change(r);
    return send(r);
  }
  Outcome parameters(std::string_view json) {
    return kserve([&](Infer& r) { add_text(r, "sampling_parameters", json); });
  }
  void TearDown() override { EXPECT_EQ(engine_.requests.size(), reached_) << "a bad request reached the engine"; }
  size_t reached_ = 0;
};

TEST_F(Contract, UnknownModel) {
  for (const Outcome& o :
       {v1([](V1& r) { r.set_model("gpt-9"); }), native([](Native& r) { r.set_model("gpt-9"); }),
        kserve([](Infer& r) { r.set_model_name("gpt-9"); }), complete(R"("model":"gpt-9")"), chat(R"("model":"gpt-9")"),
        post("/v1/messages", R"({"model":"gpt-9","max_tokens":1,"messages":[{"role":"user","content":"x"}]})"),
        post("/v1/responses", R"({"model":"gpt-9","input":"x"})")})
    expect_refused(o, Code::not_found, "model", "gpt-9");
}

TEST_F(Contract, BadUtf8) {
  expect_bad(complete("\"stop\":\"\xff\""), "JSON", "byte");
  expect_bad(chat("\"stop\":\"\xff\""), "JSON", "byte");
  expect_bad(send(infer_request("ab\xff")), "prompt", "byte 2");
  // In a proto3 string it is a message that does not parse.
  for (const auto& [method, type, bytes] : std::vector<std::tuple<const char*, const char*, std::string>>{
           {"/kvasir.v1.Inference/Generate", "kvasir.v1.GenerateRequest", "\x1a\x01\xff"},
           {"/kvasir.v1.Inference/Cancel", "kvasir.v1.CancelRequest", "\x0a\x01\xff"},
           {"/vllm.grpc.engine.VllmEngine/Generate", "vllm.grpc.engine.GenerateRequest", "\x1a\x01\xff"},
           {"/vllm.Inference/Generate", "vllm.GenerateRequest", "\x1a\x01\xff"},
           {"/vllm.Inference/GenerateStream", "vllm.GenerateRequest", "\x1a\x01\xff"},
           {"/vllm.Control/Abort", "vllm.AbortRequest", "\x0a\x01\xff"},
           {"/ppl.llm.proto.LLMService/Generation", "ppl.llm.proto.BatchedRequest", "\x0a\x03\x12\x01\xff"},
           {"/inference.GRPCInferenceService/ModelInfer", "inference.ModelInferRequest", "\x0a\x01\xff"}})
    expect_refused(raw(method, bytes), Code::internal, type, "UTF-8");
}

TEST_F(Contract, BytesThatAreNoMessage) {
  for (const char* method : {"/kvasir.v1.Inference/Generate", "/vllm.grpc.engine.VllmEngine/Generate",
                             "/ppl.llm.proto.LLMService/Generation", "/inference.GRPCInferenceService/ModelInfer",
                             "/vllm.grpc.engine.VllmEngine/Embed", "/vllm.Inference/Generate",
                             "/vllm.Inference/GenerateStream", "/vllm.Control/Abort", "/vllm.Control/LoadLora"})
    expect_refused(raw(method, "\xff\xff\xff\xff"), Code::internal, "Request", "do not parse");
  // What is there without a message to read, and what is not there at all.
  expect_bad(raw("/vllm.grpc.engine.VllmEngine/Embed", ""), "tokenized", "empty");
  EXPECT_EQ(raw("/vllm.grpc.engine.VllmEngine/StartProfile", "").code, Code::unimplemented);
  EXPECT_EQ(raw("/kvasir.v1.Inference/Nothing", "\xff\xff\xff\xff").code, Code::unimplemented);
}

// On the stream it fails alone, and what comes after it is answered.
TEST_F(Contract, BytesThatAreNoMessageAmongMessages) {
  const std::string good = infer_request("ab").SerializeAsString();
  for (std::string bad : {"\xff\xff\xff\xff", "\x0a\x01\xff"}) {
    std::vector<std::string> errors, texts;
    for (const auto& answer : exchange({bad, good, bad})) {
      if (!answer.error_message().empty())
        errors.push_back(answer.error_message());
      else
        texts.push_back(answer.infer_response().outputs(0).contents().bytes_contents(0));
    }
    ASSERT_EQ(errors.size(), 2u);
    EXPECT_THAT(errors[0], testing::HasSubstr("no inference.ModelInferRequest"));
    EXPECT_EQ(texts, std::vector<std::string>{"abab"});
    ++reached_;
  }
}

// Whoever refuses it, the adapter that read it or what they share: an operator sees each.
TEST_F(Contract, EachRefusalIsCounted) {
  auto counted = [&](const char* protocol) {
    RawClient client(server_->http_port());
    client.send(RawClient::get("/metrics"));
    const std::string page = client.read().body;
    const std::string row = cat("kvasir_calls_total{protocol=\"", protocol, "\",code=\"INVALID_ARGUMENT\"} ");
    const size_t at = page.find(row);
    return at == std::string::npos ? 0 : std::atoi(page.c_str() + at + row.size());
  };
  v1([](V1& r) { r.clear_prompt(); });
  v1([](V1& r) { r.set_n(0); });
  EXPECT_EQ(counted("kvasir.v1"), 2);
  ppl([](Ppl& r) { r.mutable_choosing_parameters()->set_watermark(true); });
  ppl([](Ppl& r) { r.clear_prompt(); });
  EXPECT_EQ(counted("ppl"), 2);
  vllm([](Vllm& r) { r.clear_text(); });
  vllm([](Vllm& r) { r.mutable_sampling_params()->set_n(1000); });
  EXPECT_EQ(counted("vllm"), 2);
  native([](Native& r) { r.clear_text(); });
  native([](Native& r) { r.mutable_decoding()->set_presence_penalty(9); });
  EXPECT_EQ(counted("vllm.inference"), 2);
  kserve([](Infer& r) { r.clear_inputs(); });
  kserve([](Infer& r) { r.set_model_version("7"); });
  parameters(R"({"max_tokens":100000})");
  exchange({"\xff\xff\xff\xff"});
  EXPECT_EQ(counted("kserve"), 4);
  complete("\"n\":\"many\"");
  complete("\"n\":0");
  post("/v1/completions", R"({"prompt":"ab"})", "X-Request-Timeout: soon\r\n");
  EXPECT_EQ(counted("openai.completions"), 3);
  chat("\"n\":\"many\"");
  post("/v1/chat/completions", "{");
  EXPECT_EQ(counted("openai.chat"), 2);
}

TEST_F(Contract, TokenIdOutOfRange) {
  expect_bad(v1([](V1& r) { r.mutable_tokens()->add_ids(257); }), "prompt", "257");
  expect_bad(v1([](V1& r) { r.mutable_tokens()->add_ids(UINT32_MAX); }), "prompt", "4294967295");
  expect_bad(v1([](V1& r) { r.add_stop_token_ids(257); }), "stop_token_ids", "257");
  expect_bad(ppl([](Ppl& r) { r.mutable_tokens()->add_ids(257); }), "prompt", "257");
  expect_bad(ppl([](Ppl& r) { r.mutable_stopping_parameters()->mutable_stop_tokens()->add_ids(257); }), "stop_tokens",
             "257");
  expect_bad(vllm([](Vllm& r) { r.mutable_tokenized()->add_input_ids(257); }), "prompt", "257");
  expect_bad(vllm([](Vllm& r) { r.mutable_sampling_params()->add_stop_token_ids(257); }), "stop_token_ids", "257");
  expect_bad(native([](Native& r) { r.mutable_token_ids()->add_ids(257); }), "prompt", "257");
  expect_bad(native([](Native& r) { r.mutable_token_ids()->add_ids(UINT32_MAX); }), "prompt", "4294967295");
  expect_bad(native([](Native& r) { r.mutable_stopping()->add_stop_token_ids(257); }), "stop_token_ids", "257");
  expect_bad(post("/v1/completions", R"({"prompt":[257]})"), "prompt", "257");
  expect_bad(post("/v1/completions", R"({"prompt":[-1]})"), "prompt", "-1");
  expect_bad(complete(R"("stop_token_ids":[257])"), "stop_token_ids", "257");
  expect_bad(chat(R"("stop_token_ids":[257])"), "stop_token_ids", "257");
  expect_bad(post("/detokenize", R"({"tokens":[257]})"), "token", "257");
}

TEST_F(Contract, PromptAndMaxTokensOverTheContext) {
  const std::string long_prompt(128, 'x');
  expect_bad(v1([](V1& r) { r.set_max_tokens(127); }), "max_tokens", "126");
  expect_bad(v1([&](V1& r) { r.set_prompt(long_prompt); }), "prompt", "128");
  expect_bad(ppl([](Ppl& r) { r.mutable_stopping_parameters()->set_max_new_tokens(127); }), "max_new_tokens", "126");
  expect_bad(ppl([&](Ppl& r) { r.set_prompt(long_prompt); }), "prompt", "128");
  expect_bad(vllm([](Vllm& r) { r.mutable_sampling_params()->set_max_tokens(127); }), "max_tokens", "126");
  expect_bad(vllm([&](Vllm& r) { r.set_text(long_prompt); }), "prompt", "128");
  expect_bad(native([](Native& r) { r.mutable_stopping()->set_max_new_tokens(127); }), "max_new_tokens", "126");
  expect_bad(native([&](Native& r) { r.set_text(long_prompt); }), "prompt", "128");
  expect_bad(parameters(R"({"max_tokens":127})"), "max_tokens", "126");
  expect_bad(send(infer_request(long_prompt)), "prompt", "128");
  expect_bad(complete(R"("max_tokens":127)"), "max_tokens", "126");
  expect_bad(chat(R"("max_completion_tokens":127)"), "max_completion_tokens", "126");
}

TEST_F(Contract, TemperatureBelowZeroOrNaN) {
  for (float bad : {-1.0f, NAN, INFINITY}) {
    std::string shown = std::isnan(bad) ? "nan" : std::isinf(bad) ? "inf" : "-1";
    expect_bad(v1([&](V1& r) { r.mutable_sampling()->set_temperature(bad); }), "temperature", shown);
    expect_bad(vllm([&](Vllm& r) { r.mutable_sampling_params()->set_temperature(bad); }), "temperature", shown);
    expect_bad(native([&](Native& r) { r.set_temperature(bad); }), "temperature", shown);
    expect_bad(ppl([&](Ppl& r) {
                 r.mutable_choosing_parameters()->set_do_sample(true);
                 r.mutable_choosing_parameters()->set_temperature(bad);
               }),
               "temperature", shown);
    expect_bad(kserve([&](Infer& r) { (*r.mutable_parameters())["temperature"].set_double_param(bad); }), "temperature",
               shown);
  }
  expect_bad(complete(R"("temperature":-1)"), "temperature", "-1");
  expect_bad(chat(R"("temperature":-1)"), "temperature", "-1");
  expect_bad(complete(R"("temperature":NaN)"), "JSON", "byte");
  expect_bad(complete(R"("temperature":1e999)"), "JSON", "");
}

TEST_F(Contract, OverLongStop) {
  const std::string stop(300, 's');
  expect_bad(v1([&](V1& r) { r.add_stop(stop); }), "stop[0]", "300");
  expect_bad(vllm([&](Vllm& r) { r.mutable_sampling_params()->add_stop(stop); }), "stop[0]", "300");
  expect_bad(native([&](Native& r) { r.mutable_stopping()->add_stop_strings(stop); }), "stop_strings[0]", "300");
  expect_bad(kserve([&](Infer& r) { (*r.mutable_parameters())["stop"].set_string_param(stop); }), "stop[0]", "300");
  expect_bad(complete(cat(R"("stop":")", stop, '"')), "stop[0]", "300");
  expect_bad(chat(cat(R"("stop":")", stop, '"')), "stop[0]", "300");
  expect_bad(v1([](V1& r) {
               for (int i = 0; i < 17; ++i) r.add_stop("x");
             }),
             "stop", "17");
  expect_bad(ppl([](Ppl& r) {
               for (int i = 0; i < 17; ++i) r.mutable_stopping_parameters()->mutable_stop_tokens()->add_ids(1);
             }),
             "stop_tokens", "17");
}

TEST_F(Contract, LogitBias) {
  expect_bad(v1([](V1& r) { (*r.mutable_sampling()->mutable_logit_bias())[257] = 1; }), "logit_bias", "257");
  expect_bad(v1([](V1& r) { (*r.mutable_sampling()->mutable_logit_bias())[1] = NAN; }), "logit_bias", "nan");
  expect_bad(vllm([](Vllm& r) { (*r.mutable_sampling_params()->mutable_logit_bias())[257] = 1; }), "logit_bias", "257");
  expect_bad(native([](Native& r) { (*r.mutable_decoding()->mutable_logit_bias())[257] = 1; }), "logit_bias", "257");
  expect_bad(native([](Native& r) { (*r.mutable_decoding()->mutable_logit_bias())[1] = 101; }), "logit_bias", "101");
  expect_bad(complete(R"("logit_bias":{"257":1})"), "logit_bias", "257");
  expect_bad(chat(R"("logit_bias":{"1":101})"), "logit_bias", "101");
  std::string many;
  for (int i = 0; i < 2000; ++i) many += cat(i ? "," : "", '"', i, "\":1");
  expect_bad(complete(cat(R"("logit_bias":{)", many, "}")), "logit_bias", "1024");
}

TEST_F(Contract, AllowedTokenIds) {
  auto allow = [&](std::vector<uint32_t> ids) {
    return v1([ids](V1& r) {
      r.mutable_allowed_token_ids();
      for (uint32_t id : ids) r.mutable_allowed_token_ids()->add_ids(id);
    });
  };
  auto infer = [&](const char* ids) {
    return kserve([ids](Infer& r) { (*r.mutable_parameters())["allowed_token_ids"].set_string_param(ids); });
  };
  expect_bad(allow({}), "allowed_token_ids", "empty");
  expect_bad(allow({1, 257}), "allowed_token_ids", "257");
  expect_bad(allow(std::vector<uint32_t>(258, 1)), "allowed_token_ids", "258");
  expect_bad(native([](Native& r) { r.mutable_decoding()->add_allowed_token_ids(257); }), "allowed_token_ids", "257");
  expect_bad(infer("[]"), "allowed_token_ids", "empty");
  expect_bad(infer("[300]"), "allowed_token_ids", "300");
  expect_bad(infer("3"), "allowed_token_ids", "list");
  expect_bad(complete(R"("allowed_token_ids":[])"), "allowed_token_ids", "empty");
  expect_bad(chat(R"("allowed_token_ids":[-1])"), "allowed_token_ids", "-1");
  expect_bad(chat(R"("allowed_token_ids":[1.5])"), "allowed_token_ids", "1.5");
  std::string many = "1";
  for (int i = 0; i < 257; ++i) many += ",1";
  expect_bad(complete(cat(R"("allowed_token_ids":[)", many, ']')), "allowed_token_ids", "258");
  V1 some = v1_request();
  some.mutable_allowed_token_ids()->add_ids(9);
  EXPECT_EQ(send(some).code, Code::ok);
  EXPECT_EQ(engine_.last().allowed_tokens, std::vector<int32_t>{9});
  Infer other = infer_request();
  (*other.mutable_parameters())["allowed_token_ids"].set_string_param("[8, 8]");
  EXPECT_EQ(send(other).code, Code::ok);
  EXPECT_EQ(engine_.last().allowed_tokens, (std::vector<int32_t>{8, 8}));
  reached_ = 2;
}

TEST_F(Contract, OnlyTheAssistantsMessageGoesOn) {
  expect_bad(chat(R"("continue_final_message":true)"), "continue_final_message", "user");
  expect_bad(v1([](V1& r) {
               r.mutable_chat()->add_messages()->set_role("user");
               r.mutable_chat()->set_continue_final_message(true);
             }),
             "continue_final_message", "user");
  V1 open = v1_request();
  open.mutable_chat()->add_messages()->set_role("assistant");
  open.mutable_chat()->mutable_messages(0)->set_content("ab");
  open.mutable_chat()->set_continue_final_message(true);
  EXPECT_EQ(send(open).code, Code::ok);
  EXPECT_EQ(engine_.last().prompt, (std::vector<int32_t>{'a', 'b'}));
  reached_ = 1;
}

TEST_F(Contract, ToolsOverTheCap) {
  std::string tools;
  for (int i = 0; i < 129; ++i) tools += cat(i ? "," : "", R"({"type":"function","function":{"name":"f)", i, "\"}}");
  expect_bad(chat(cat(R"("tools":[)", tools, "]")), "tools", "129");
  expect_bad(v1([&](V1& r) {
               r.mutable_chat()->set_messages_json(R"([{"role":"user","content":"x"}])");
               r.mutable_chat()->set_tools_json(cat('[', tools, ']'));
             }),
             "tools", "129");
}

TEST_F(Contract, ChoicesOverTheCap) {
  expect_bad(v1([](V1& r) { r.set_n(129); }), "n", "129");
  expect_bad(v1([](V1& r) { r.set_n(0); }), "n", "0");
  expect_bad(vllm([](Vllm& r) { r.mutable_sampling_params()->set_n(129); }), "n", "129");
  Native many = native_request();
  many.mutable_sampling()->set_num_sequences(129);
  expect_bad(send(many), "num_sequences", "129");
  expect_bad(send_streamed(many), "num_sequences", "128");
  expect_bad(complete(R"("n":129)"), "n", "129");
  expect_bad(complete(R"("n":0)"), "n", "0");
  expect_bad(complete(R"("best_of":129)"), "n", "129");
  expect_bad(complete(R"("n":-1,"best_of":3)"), "n", "-1");  // took the server down
  expect_bad(complete(R"("n":0,"best_of":3)"), "n", "0");
  expect_bad(post("/v1/completions", R"({"prompt":["a","b"],"best_of":100})"), "choices", "200");
  expect_bad(chat(R"("n":129)"), "n", "129");
}

TEST_F(Contract, LogprobsOverTheCap) {
  expect_bad(v1([](V1& r) { r.set_logprobs(21); }), "logprobs", "21");
  expect_bad(v1([](V1& r) { r.set_prompt_logprobs(21); }), "prompt_logprobs", "21");
  expect_bad(vllm([](Vllm& r) { r.mutable_sampling_params()->set_logprobs(21); }), "logprobs", "21");
  expect_bad(vllm([](Vllm& r) { r.mutable_sampling_params()->set_prompt_logprobs(21); }), "prompt_logprobs", "21");
  expect_bad(native([](Native& r) {
               r.mutable_response()->set_output_logprobs(true);
               r.mutable_response()->mutable_output_candidates()->set_top_n(21);
             }),
             "output_candidates", "21");
  expect_bad(complete(R"("logprobs":21)"), "logprobs", "21");
  expect_bad(chat(R"("logprobs":true,"top_logprobs":21)"), "top_logprobs", "21");
}

TEST_F(Contract, MalformedJson) {
  for (const char* path : {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"})
    expect_bad(post(path, R"({"prompt":)"), "JSON", "byte");
  expect_bad(parameters(R"({"top_k":)"), "sampling_parameters", "JSON");
  for (auto set : std::vector<std::function<void(kvasir::v1::Chat&)>>{
           [](auto& chat) { chat.set_messages_json("{\"a\":"); }, [](auto& chat) { chat.set_tools_json("{\"a\":"); },
           [](auto& chat) { chat.set_template_variables_json("{\"a\":"); }})
    expect_bad(v1([&](V1& r) {
                 r.mutable_chat()->set_messages_json(R"([{"role":"user","content":"x"}])");
                 set(*r.mutable_chat());
               }),
               "chat.", "JSON");
}

TEST_F(Contract, JsonTenThousandDeep) {
  const std::string deep = std::string(10000, '[') + std::string(10000, ']');
  for (const char* path : {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"})
    expect_bad(post(path, cat(R"({"prompt":)", deep, "}")), "deep", "64");
  expect_bad(chat(cat(R"("tools":)", deep)), "deep", "64");
  expect_bad(complete(cat(R"("guided_json":)", deep)), "deep", "64");
  expect_bad(complete(cat(R"("guided_json":")", deep, '"')), "deep", "64");
  expect_bad(parameters(cat(R"({"temperature":)", deep, "}")), "deep", "64");
  expect_bad(kserve([&](Infer& r) { (*r.mutable_parameters())["temperature"].set_string_param(deep); }), "temperature",
             "number");
  expect_bad(v1([&](V1& r) { r.mutable_chat()->set_messages_json(deep); }), "messages", "64");
  expect_bad(v1([&](V1& r) { r.mutable_grammar()->set_json_schema(deep); }), "schema", "64");
  expect_bad(vllm([&](Vllm& r) { r.mutable_sampling_params()->set_json_schema(deep); }), "schema", "64");
  expect_bad(native([&](Native& r) { r.mutable_decoding()->set_json(deep); }), "schema", "64");
}

TEST_F(Contract, UnknownEnum) {
  expect_bad(post("/v1/chat/completions", R"({"messages":[{"role":"robot","content":"x"}]})"), "role", "robot");
  expect_bad(chat(R"("tool_choice":"perhaps")"), "tool_choice", "perhaps");
  expect_bad(chat(R"("response_format":{"type":"xml"})"), "response_format", "xml");
  expect_bad(complete(R"("service_tier":"gold")"), "service_tier", "gold");
  expect_bad(chat(R"("prompt_cache_retention":"24h")"), "prompt_cache_retention", "in_memory");
  for (const char* kept : {"in_memory", "in-memory"}) {  // OpenAI's clients have had both
    EXPECT_EQ(chat(cat("\"prompt_cache_retention\":\"", kept, "\"")).code, Code::ok) << kept;
    ++reached_;
  }
  expect_bad(v1([](V1& r) {
               auto& m = *r.mutable_chat()->add_messages();
               m.set_role("robot");
               m.set_content("x");
             }),
             "role", "robot");
  expect_bad(kserve([](Infer& r) { r.mutable_inputs(0)->set_datatype("FP7"); }), "text_input", "FP7");
}

TEST_F(Contract, FieldsThatAreNotServedAreNamed) {
  expect_bad(ppl([](Ppl& r) { r.mutable_choosing_parameters()->set_watermark(true); }), "watermark", "unset");
  expect_bad(vllm([](Vllm& r) { r.set_kv_transfer_params_json("{}"); }), "kv_transfer_params_json", "unset");
  expect_bad(native([](Native& r) { r.add_media(); }), "media", "unset");
  expect_bad(kserve([](Infer& r) { (*r.mutable_parameters())["beam_width"].set_int64_param(2); }), "beam_width",
             "not served");
  expect_bad(complete(R"("suffix":"z")"), "suffix", "not served");
  expect_bad(complete(R"("tempratur":1)"), "tempratur", "not a field");
  for (const char* field : {"functions", "function_call", "audio", "web_search_options", "store"})
    expect_bad(chat(cat('"', field, R"(":{"a":1})")), field, "not served");
}

TEST_F(Contract, QueueFullIsToldWithATimeToComeBack) {
  engine_.refuse(resource_exhausted("the queue is full").with_retry_after(std::chrono::milliseconds(2500)));
  for (const Outcome& o : everywhere()) {
    expect_refused(o, Code::resource_exhausted, "queue", "full");
    bool alone = o.protocol == "ppl" || o.protocol == "kserve stream";  // their wires have no place for it
    EXPECT_EQ(o.retry_after, alone ? "" : "3") << o.protocol;
  }
}

TEST_F(Contract, DeadlinePassed) {
  engine_.refuse({Code::deadline_exceeded, "the deadline passed while waiting"});
  for (const Outcome& o : everywhere()) expect_refused(o, Code::deadline_exceeded, "deadline", "passed");
  engine_.refuse({});
  expect_bad(post("/v1/completions", R"({"prompt":"ab"})", "X-Request-Timeout: soon\r\n"), "X-Request-Timeout", "soon");
  expect_refused(post("/v1/completions", R"({"prompt":"ab"})", "X-Request-Timeout: 1e-9\r\n"), Code::deadline_exceeded,
                 "deadline", "");
  EXPECT_EQ(post("/v1/completions", R"({"prompt":"ab"})", "X-Request-Timeout: 20\r\n").code, Code::ok);
  reached_ = 1;
  auto left = *engine_.last().deadline - std::chrono::steady_clock::now();
  EXPECT_LT(left, std::chrono::seconds(21));
  EXPECT_GT(left, std::chrono::seconds(5));
}

TEST_F(Contract, NotReadyOrGoingAway) {
  for (auto state : {engine::State::starting, engine::State::draining, engine::State::stopped}) {
    engine_.set_state(state);
    for (const Outcome& o : everywhere()) expect_refused(o, Code::unavailable, "", "");
  }
  engine_.set_state(engine::State::serving);
}

class ContractBodies : public ContractFixture {
 protected:
  static ServerOptions small() {
    ServerOptions o;
    o.max_body.bytes = 64 << 10;
    return o;
  }
  ContractBodies() : ContractFixture(small()) {}
};

TEST_F(ContractBodies, OverTheLimitKeepTheTransportsStatus) {
  const std::string large(70 << 10, 'x');
  V1 v1 = v1_request();
  v1.set_prompt(large);
  Ppl ppl = ppl_request();
  ppl.set_prompt(large);
  Vllm vllm = vllm_request();
  vllm.set_text(large);
  Native native = native_request();
  native.set_text(large);
  for (const Outcome& o : {send(v1), send(ppl), send(vllm), send(native), send_streamed(native),
                           send(infer_request(large)), send_streamed(infer_request(large))})
    EXPECT_EQ(o.code, Code::resource_exhausted) << o.protocol << o.message;
  for (const char* path : {"/v1/completions", "/v1/chat/completions", "/tokenize"}) {
    RawClient client(server_->http_port());
    client.send(RawClient::post(path, cat(R"({"prompt":")", large, "\"}")));
    EXPECT_EQ(client.read().status, 413) << path;
  }
  EXPECT_TRUE(engine_.requests.empty());
}

class ContractKeys : public ContractFixture {
 protected:
  ContractKeys() {
    char name[] = "/tmp/kvasir-contract-XXXXXX";
    folder_ = mkdtemp(name);
    options_.keys_file = folder_ + "/keys.json";
    KeyEntry user, metrics;
    user.caller.user = true;
    metrics.caller.metrics = true;
    user.caller.tenant = "user";
    metrics.caller.tenant = "metrics";
    user_ = *add_key(options_.keys_file, user);
    metrics_ = *add_key(options_.keys_file, metrics);
  }
  ~ContractKeys() override { std::filesystem::remove_all(folder_); }
  std::string folder_, user_, metrics_;
};

TEST_F(ContractKeys, MissingWrongAndOfAnotherRole) {
  for (const Outcome& o : everywhere()) expect_refused(o, Code::unauthenticated, "key", "");
  key_ = "kv-nonsense";
  for (const Outcome& o : everywhere()) expect_refused(o, Code::unauthenticated, "key", "");
  key_ = metrics_;
  for (const Outcome& o : everywhere()) expect_refused(o, Code::permission_denied, "role", "user");
  EXPECT_TRUE(engine_.requests.empty());
  key_ = user_;
  for (const Outcome& o : everywhere()) EXPECT_EQ(o.code, Code::ok) << o.protocol << o.message;
}

}  // namespace
}  // namespace kvasir::server
