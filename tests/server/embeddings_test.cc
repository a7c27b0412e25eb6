// Embeddings and scores over every protocol that has them, from a scripted engine: what reaches it, what comes back,
// and every way of asking wrongly.
#include <cstring>

#include "tests/server/contract_fixture.h"

namespace kvasir::server {
namespace {

using testing::HasSubstr;

class Embeddings : public ContractFixture {
 protected:
  static ServerOptions few() {
    ServerOptions o;
    o.max_inputs = 300;
    o.max_running = 8;
    return o;
  }
  Embeddings() : ContractFixture(few()) {}

  Json whole(std::string_view path, std::string_view body) {
    RawClient client(server_->http_port());
    client.send(RawClient::post(path, body));
    RawClient::Answer a = client.read();
    EXPECT_EQ(a.status, 200) << a.body;
    return Json::parse(a.body);
  }
  Outcome embed(std::string_view fields) { return post("/v1/embeddings", cat("{", fields, "}")); }

  // What the scripted engine gives for a text that begins so.
  static std::vector<float> vector_of(std::string_view text) {
    const auto first = float(static_cast<unsigned char>(text[0]));
    return {3 * first, 4 * first, 0, float(text.size())};
  }
};

TEST_F(Embeddings, TextsAndIdsBecomeVectorsInOrder) {
  Json one = whole("/v1/embeddings", R"({"input":"ab","model":"fake","user":"u"})");
  EXPECT_EQ(one["object"], "list");
  EXPECT_EQ(one["model"], "fake");
  EXPECT_EQ(one["data"][0]["object"], "embedding");
  EXPECT_EQ(one["data"][0]["embedding"].get<std::vector<float>>(), vector_of("ab"));
  EXPECT_EQ(one["usage"], Json({{"prompt_tokens", 2}, {"total_tokens", 2}}));
  EXPECT_TRUE(engine_.last().pooled);
  EXPECT_EQ(engine_.last().max_tokens, 0);
  for (const char* input : {R"(["ab","c","def"])", "[[97,98],[99],[100,101,102]]"}) {
    Json list = whole("/v1/embeddings", cat("{\"input\":", input, "}"));
    ASSERT_EQ(list["data"].size(), 3u);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(list["data"][i]["index"], i);
      EXPECT_EQ(list["data"][i]["embedding"].get<std::vector<float>>(), vector_of(i == 0   ? "ab"
                                                                                  : i == 1 ? "c"
                                                                                           : "def"));
    }
    EXPECT_EQ(list["usage"]["prompt_tokens"], 6);
  }
  EXPECT_EQ(whole("/v1/embeddings", R"({"input":[97,98]})")["data"].size(), 1u);
  EXPECT_TRUE(engine_.wait_open(0));
}

TEST_F(Embeddings, Base64IsTheFloatsThemselves) {
  Json one = whole("/v1/embeddings", R"({"input":"ab","encoding_format":"base64","dimensions":2,"normalize":false})");
  // 291 and 388, little end first.
  EXPECT_EQ(one["data"][0]["embedding"], "AICRQwAAwkM=");
  EXPECT_EQ(engine_.last().dimensions, 2);
  EXPECT_EQ(engine_.last().normalize, false);
}

// More than are in the engine at once, and more than its queue takes.
TEST_F(Embeddings, ManyTextsTakeTurns) {
  std::string input;
  for (int i = 0; i < 300; ++i)
    input += cat(i > 0 ? "," : "", "\"", char('a' + i % 26), std::string(size_t(i % 7), 'x'), "\"");
  Json list = whole("/v1/embeddings", cat("{\"input\":[", input, "]}"));
  ASSERT_EQ(list["data"].size(), 300u);
  for (int i = 0; i < 300; ++i)
    EXPECT_EQ(list["data"][size_t(i)]["embedding"].get<std::vector<float>>(),
              vector_of(cat(char('a' + i % 26), std::string(size_t(i % 7), 'x'))));
  EXPECT_EQ(engine_.asked(), 300u);
  EXPECT_TRUE(engine_.wait_open(0));
}

TEST_F(Embeddings, WhatIsWrongIsRefusedByName) {
  expect_bad(embed(R"("model":"fake")"), "input", "missing");
  expect_bad(embed(R"("input":[])"), "input", "empty");
  expect_bad(embed(R"("input":"")"), "input", "empty");
  expect_bad(embed(R"("input":7)"), "input", "7");
  expect_bad(embed(R"("input":["a",""])"), "input[1]", "empty");
  expect_bad(embed(R"("input":[[97],[5000]])"), "input[1]", "5000");
  expect_bad(embed(cat(R"("input":["a",")", std::string(400, 'a'), "\"]")), "input[1]", "400");
  expect_bad(embed(R"("input":"a","dimensions":0)"), "dimensions", "0");
  expect_bad(embed(R"("input":"a","dimensions":"x")"), "dimensions", "x");
  expect_bad(embed(R"("input":"a","normalize":1)"), "normalize", "true or false");
  expect_bad(embed(R"("input":"a","encoding_format":"hex")"), "encoding_format", "hex");
  expect_bad(embed(R"("input":"a","temperature":1)"), "temperature", "");
  expect_bad(embed(R"("input":"a","nothing":1)"), "nothing", "");
  expect_bad(embed(R"("input":"a","truncate_prompt_tokens":3)"), "truncate_prompt_tokens", "");
  std::string many = "\"a\"";
  for (int i = 0; i < 300; ++i) many += ",\"a\"";
  expect_bad(embed(cat(R"("input":[)", many, "]")), "input", "300");
  expect_refused(embed(R"("input":"a","model":"other")"), Code::not_found, "model", "other");
  EXPECT_EQ(engine_.asked(), 0u);
  // What belongs to embeddings is of no use to answers.
  expect_bad(complete(R"("dimensions":2)"), "dimensions", "");
}

TEST_F(Embeddings, AnEnginesRefusalIsTheCalls) {
  engine_.refuse(resource_exhausted("the queue is full").with_retry_after(std::chrono::seconds(2)));
  Outcome o = embed(R"("input":"a")");
  EXPECT_EQ(o.code, Code::resource_exhausted);
  EXPECT_EQ(o.retry_after, "2");
}

TEST_F(Embeddings, AClientThatGoesTakesItsTextsWithIt) {
  {
    RawClient client(server_->http_port());
    client.send(RawClient::post("/v1/embeddings", R"({"input":["a","b","c"],"cache_salt":"hang"})"));
    EXPECT_TRUE(engine_.wait_open(3));
  }
  EXPECT_TRUE(engine_.wait_open(0));
}

TEST_F(Embeddings, OverOurOwnContract) {
  auto stub = kvasir::v1::Inference::NewStub(channel_);
  kvasir::v1::EmbedRequest in;
  in.add_inputs()->set_text("ab");
  in.add_inputs()->mutable_tokens()->add_ids('c');
  in.set_dimensions(3);
  in.set_normalize(false);
  in.set_request_id("e1");
  kvasir::v1::EmbedResponse out;
  {
    grpc::ClientContext call;
    grpc::Status s = stub->Embed(&call, in, &out);
    ASSERT_TRUE(s.ok()) << s.error_message();
  }
  ASSERT_EQ(out.embeddings_size(), 2);
  EXPECT_THAT(out.embeddings(0).values(), testing::ElementsAre(3 * 97, 4 * 97, 0));
  EXPECT_THAT(out.embeddings(1).values(), testing::ElementsAre(3 * 99, 4 * 99, 0));
  EXPECT_EQ(out.usage().prompt_tokens(), 3u);
  EXPECT_EQ(out.request_id(), "e1");
  EXPECT_EQ(engine_.last().normalize, false);
  auto refused = [&](const kvasir::v1::EmbedRequest& r) {
    grpc::ClientContext call;
    return stub->Embed(&call, r, &out);
  };
  in.set_dimensions(0);
  EXPECT_THAT(refused(in).error_message(), HasSubstr("dimensions is 0"));
  in.clear_dimensions();
  in.add_inputs();
  EXPECT_THAT(refused(in).error_message(), HasSubstr("inputs[2]"));
  EXPECT_THAT(refused({}).error_message(), HasSubstr("input is empty"));
  // A deadline ends it, and the engine's work.
  kvasir::v1::EmbedRequest slow;
  slow.add_inputs()->set_text("ab");
  slow.set_cache_salt("hang");
  grpc::ClientContext call;
  call.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(300));
  EXPECT_EQ(stub->Embed(&call, slow, &out).error_code(), grpc::DEADLINE_EXCEEDED);
  EXPECT_TRUE(engine_.wait_open(0));
}

TEST_F(Embeddings, OverTheGatewaysContract) {
  auto stub = vllm::grpc::engine::VllmEngine::NewStub(channel_);
  vllm::grpc::engine::EmbedRequest in;
  for (uint32_t id : {97u, 98u}) in.mutable_tokenized()->add_input_ids(id);
  vllm::grpc::engine::EmbedResponse out;
  {
    grpc::ClientContext call;
    grpc::Status s = stub->Embed(&call, in, &out);
    ASSERT_TRUE(s.ok()) << s.error_message();
  }
  EXPECT_THAT(out.embedding(), testing::ElementsAre(3 * 97, 4 * 97, 0, 2));
  EXPECT_EQ(out.prompt_tokens(), 2u);
  EXPECT_EQ(out.embedding_dim(), 4u);
  grpc::ClientContext call;
  grpc::Status s = stub->Embed(&call, {}, &out);
  EXPECT_EQ(s.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(s.error_message(), HasSubstr("tokenized"));
}

TEST_F(Embeddings, OverKServe) {
  auto stub = inference::GRPCInferenceService::NewStub(channel_);
  for (bool raw : {false, true}) {
    Infer in = infer_request("ab");
    if (raw) {
      in.mutable_inputs(0)->clear_contents();
      in.add_raw_input_contents(std::string("\2\0\0\0ab", 6));
    }
    in.add_outputs()->set_name("embedding");
    (*in.mutable_parameters())["normalize"].set_bool_param(false);
    inference::ModelInferResponse out;
    grpc::ClientContext call;
    grpc::Status s = stub->ModelInfer(&call, in, &out);
    ASSERT_TRUE(s.ok()) << s.error_message();
    EXPECT_EQ(out.outputs(0).name(), "embedding");
    EXPECT_EQ(out.outputs(0).datatype(), "FP32");
    EXPECT_THAT(out.outputs(0).shape(), testing::ElementsAre(1, 4));
    std::vector<float> got(4);
    if (raw) {
      ASSERT_EQ(out.raw_output_contents(0).size(), 16u);
      std::memcpy(got.data(), out.raw_output_contents(0).data(), 16);
    } else {
      got.assign(out.outputs(0).contents().fp32_contents().begin(), out.outputs(0).contents().fp32_contents().end());
    }
    EXPECT_EQ(got, vector_of("ab"));
    EXPECT_EQ(engine_.last().normalize, false);
  }
  Infer in = infer_request("ab");
  in.add_outputs()->set_name("embedding");
  expect_bad(send_streamed(in), "embedding", "ModelInfer");
  (*in.mutable_parameters())["temperature"].set_double_param(1);
  expect_bad(send(in), "temperature", "not served");
  in = infer_request("ab");
  in.add_outputs()->set_name("embedding");
  in.add_outputs()->set_name("text_output");
  expect_bad(send(in), "outputs", "one of them");
  in = infer_request("ab");
  in.add_outputs()->set_name("hidden");
  expect_bad(send(in), "hidden", "embedding");
}

// The words by which the scripted engine "scores": it gives their ids, of which yes has the greater.
class Judge final : public text::Tokenizer {
 public:
  int32_t vocab_size() const override { return bytes_.vocab_size(); }
  Result<std::vector<int32_t>> encode(std::string_view text, bool a, bool b) const override {
    return bytes_.encode(text, a, b);
  }
  Result<std::string> decode(std::span<const int32_t> ids, bool skip) const override {
    return bytes_.decode(ids, skip);
  }
  std::string token_text(int32_t id) const override { return bytes_.token_text(id); }
  std::string token_bytes(int32_t id) const override { return bytes_.token_bytes(id); }
  bool is_special(int32_t id) const override { return bytes_.is_special(id); }
  int32_t token_id(std::string_view text) const override { return text == "yes" ? 3 : text == "no" ? 2 : 1; }
  int32_t bos() const override { return -1; }
  const std::vector<int32_t>& end_of_generation() const override { return bytes_.end_of_generation(); }
  const std::string& chat_template() const override { return bytes_.chat_template(); }

 private:
  ByteTokenizer bytes_;
};

class Ranks : public Embeddings {
 protected:
  Ranks() {
    engine_.set_context(4096);
    engine_.use_tokenizer(std::make_shared<Judge>());
  }
  std::string asked(size_t i) {
    std::string text;
    for (int32_t id : engine_.requests.at(i).prompt) text += char(id);
    return text;
  }
};

TEST_F(Ranks, DocumentsAreJudgedAsTheRerankerWasTrainedTo) {
  Json all = whole("/v1/rerank", R"({"query":"q?","documents":["one",{"text":"two"},"three"],"top_n":2})");
  ASSERT_EQ(all["results"].size(), 2u);
  EXPECT_EQ(all["results"][0]["index"], 0);
  EXPECT_EQ(all["results"][1]["document"]["text"], "two");
  EXPECT_NEAR(all["results"][0]["relevance_score"].get<double>(), 1 / (1 + std::exp(-1.0)), 1e-6);
  EXPECT_GT(all["usage"]["total_tokens"], 0);
  EXPECT_EQ(engine_.requests.at(0).scored, (std::vector<int32_t>{3, 2}));
  EXPECT_EQ(
      asked(0),
      "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
      "provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n<Instruct>: Given "
      "a web search query, retrieve relevant passages that answer the query\n<Query>: q?\n<Document>: "
      "one<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n");
  Json hidden = whole("/rerank", R"({"query":"q","documents":["a"],"return_documents":false,"instruction":"Find it"})");
  EXPECT_FALSE(hidden["results"][0].contains("document"));
  EXPECT_THAT(asked(3), HasSubstr("<Instruct>: Find it\n"));
}

TEST_F(Ranks, PairsHaveScores) {
  Json one = whole("/score", R"({"text_1":"q","text_2":["a","b"]})");
  ASSERT_EQ(one["data"].size(), 2u);
  EXPECT_EQ(one["data"][1]["index"], 1);
  EXPECT_NEAR(one["data"][1]["score"].get<double>(), 1 / (1 + std::exp(-1.0)), 1e-6);
  EXPECT_THAT(asked(1), HasSubstr("<Query>: q\n<Document>: b"));
  whole("/v1/score", R"({"text_1":["q","r"],"text_2":["a","b"]})");
  EXPECT_THAT(asked(3), HasSubstr("<Query>: r\n<Document>: b"));
}

TEST_F(Ranks, WhatIsWrongIsRefusedByName) {
  expect_bad(post("/v1/rerank", R"({"documents":["a"]})"), "query", "missing");
  expect_bad(post("/v1/rerank", R"({"query":"q"})"), "documents", "missing");
  expect_bad(post("/v1/rerank", R"({"query":"q","documents":[]})"), "documents", "empty");
  expect_bad(post("/v1/rerank", R"({"query":"q","documents":[7]})"), "documents", "[0]");
  expect_bad(post("/v1/rerank", R"({"query":"q","documents":["a"],"top_n":0})"), "top_n", "0");
  expect_bad(post("/v1/rerank", R"({"query":"q","documents":["a"],"dimensions":3})"), "dimensions", "");
  expect_bad(post("/score", R"({"text_1":["a","b"],"text_2":["c"]})"), "text_1", "2");
  expect_bad(post("/score", R"({"text_1":"a"})"), "text_2", "missing");
  EXPECT_EQ(engine_.asked(), 0u);
}

TEST_F(Embeddings, AModelWithoutTheWordsJudgesNothing) {
  Outcome o = post("/v1/rerank", R"({"query":"q","documents":["a"]})");
  EXPECT_EQ(http_status(o.code), http_status(Code::failed_precondition));
  EXPECT_THAT(o.message, HasSubstr("\"yes\""));
}

}  // namespace
}  // namespace kvasir::server
