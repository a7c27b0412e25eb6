// What a call for embeddings or scores is answered with: one body, when all of it is known.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/request.h"
#include "server/http/error_body.h"
#include "server/http/http.h"
#include "server/services.h"

namespace kvasir::server::http {

// A call as an adapter has read it, and how its results become a body.
struct PooledCall {
  GenerateInput input;
  std::vector<PooledPrompt> prompts;
  std::function<std::string(const engine::Finished& all, const std::string& model, const std::string& id)> body;
  HttpResponse (*refuse)(const Status&) = error_response;  // in the protocol's form
};

// `write` makes the body of the results.
std::unique_ptr<Producer> pooled_reply(std::unique_ptr<engine::Stream> stream,
                                       std::function<std::string(const engine::Finished&)> write,
                                       std::vector<std::pair<std::string, std::string>> headers,
                                       HttpResponse (*refuse)(const Status&));

// "[0.1,-0.25]", each number the shortest that reads back as it was; or its float32s, little end first, as base64.
void append_vector(std::string& out, const std::vector<float>& values);
void append_base64(std::string& out, const std::vector<float>& values);

}  // namespace kvasir::server::http
