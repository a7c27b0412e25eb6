// Any bytes as the body of each endpoint that takes one: an answer that is JSON, or a stream of it, never a crash.
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "server/http/api.h"
#include "tests/fuzz/seeds.h"
#include "tests/server/fake_engine.h"

namespace kvasir::server {
namespace {

constexpr const char* kPaths[] = {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize",
                                  "/v1/embeddings",  "/completion",          "/infill"};

struct World {
  World() {
    ServerOptions options;
    options.access_log = false;
    options.max_choices = 8;
    engine.floods = false;
    services = *Services::create(options, engine);
    api = std::make_unique<http::Api>(*services);
  }
  FakeEngine engine;
  std::unique_ptr<Services> services;
  std::unique_ptr<http::Api> api;
};

void must_be_json(std::string_view text) {
  if (!nlohmann::json::accept(text)) abort();
}

void must_be_events(std::string_view text) {
  while (!text.empty()) {
    size_t end = text.find("\n\n");
    if (end == std::string_view::npos || !text.starts_with("data: ")) abort();
    std::string_view event = text.substr(6, end - 6);
    text.remove_prefix(end + 2);
    if (event != "[DONE]") must_be_json(event);
  }
}

void read_to_the_end(http::Producer& producer) {
  std::string text;
  using Progress = http::Producer::Progress;
  for (int i = 0; i < 100; ++i) {  // the scripted engine may hang or flood: then it is given up
    Progress progress = producer.poll();
    if (progress == Progress::waiting) return;
    text += producer.take();
    if (progress != Progress::done) continue;
    if (producer.streams())
      must_be_events(text);
    else
      must_be_json(text);
    return;
  }
}

}  // namespace
}  // namespace kvasir::server

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  // The first character chooses the endpoint.
  kvasir::write_seeds(
      *argc, *argv,
      {R"(0{"prompt":"ab","n":2,"best_of":3,"logprobs":2,"echo":true,"stop":["x"],"logit_bias":{"5":-1},"seed":7})",
       R"(0{"prompt":[[1,2],[3]],"stream":true,"stream_options":{"include_usage":true},"max_tokens":4,"top_k":-1})",
       R"(1{"messages":[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text","text":"a"}]}],
           "tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}],
           "tool_choice":"required","stream":true})",
       R"(1{"messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"c","type":"function",
           "function":{"name":"f","arguments":"{\"a\":1}"}}]},{"role":"tool","tool_call_id":"c","content":"r"}],
           "logprobs":true,"top_logprobs":1,"chat_template_kwargs":{"x":true},"user":"u","metadata":{"k":"v"}})",
       R"(1{"messages":[{"role":"user","content":"a"}],"response_format":{"type":"json_schema",
           "json_schema":{"name":"n","schema":{"type":"object"}}},"max_completion_tokens":3,"modalities":["text"]})",
       R"(2{"prompt":"ab","add_special_tokens":false})", R"(2{"messages":[{"role":"user","content":"a"}],"tools":[]})",
       R"(3{"tokens":[104,105],"skip_special_tokens":true})", "4{}",
       R"(5{"prompt":["ab",[99,"d"]],"n_predict":3,"n_probs":2,"logit_bias":[["a",-1]],"stream":true,
           "return_progress":true})",
       R"(5{"prompt":[1,"a"],"response_fields":["timings/prompt_n"],"cache_prompt":false,"json_schema":{}})",
       R"(6{"input_prefix":"a","input_suffix":"b","input_extra":[{"text":"c"}]})"});
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvasir::server;
  static World* world = new World;
  if (size == 0) return 0;
  http::HttpRequest request;
  request.method = "POST";
  request.path = kPaths[data[0] % 48 % std::size(kPaths)];
  request.headers = {{"host", "localhost"}, {"content-type", "application/json"}};
  request.body.assign(reinterpret_cast<const char*>(data) + 1, size - 1);
  {
    http::Admission admission = world->api->admit(request);
    http::Reply reply = admission.refusal ? *std::move(admission.refusal) : admission.answer(request);
    if (auto* whole = std::get_if<http::HttpResponse>(&reply)) {
      must_be_json(whole->body);
      if (whole->status == 500) abort();
    } else {
      read_to_the_end(*std::get<std::unique_ptr<http::Producer>>(reply));
    }
  }
  if (world->engine.open() != 0) abort();
  world->engine.forget();
  return 0;
}
