// Streams of chats that outlive the connection they were asked for on, as llama-server has them: a page that is loaded
// again finds its answer, and one that is stopped ends.
#include <charconv>

#include "core/cat.h"
#include "server/http/api.h"
#include "server/http/error_body.h"
#include "server/http/query.h"

namespace kvasir::server::http {
namespace {

constexpr size_t kMostId = 512;

// Where it is kept; no response's id has a '/'.
std::string kept_as(std::string_view conversation) { return cat("conversation/", conversation); }

}  // namespace

// What a client calls the conversation; empty: its streams end with its connection, as they do where nothing is kept.
std::string Api::conversation_of(const HttpRequest& request) const {
  const std::string_view id = request.header("x-conversation-id");
  const bool kept = services_.options().response_store.bytes > 0 && id.size() <= kMostId;
  return kept ? std::string(id) : "";
}

// One that the conversation had before is forgotten.
Reply Api::outliving(const HttpRequest& request, const Caller& caller, std::unique_ptr<Producer> answer,
                     const std::string& id, const std::string& conversation) {
  auto stream = std::make_shared<BackgroundResponse>(true);
  const std::string key = kept_as(conversation);
  response_store_.keep(caller.tenant, key, {"", id, "", stream});
  background_.start(stream, std::move(answer),
                    [this, tenant = caller.tenant, key] { return response_store_.recount(tenant, key); });
  return stream->follow(0, headers_of(request, caller, id));
}

Reply Api::kept_stream(const HttpRequest& request, const Caller& caller) {
  const std::string id = percent_decoded(query_parameter(request.query, "conv_id"));
  if (id.empty())
    return error_response(
        invalid_argument("conv_id is missing; say it as the header X-Conversation-Id said it: /v1/stream?conv_id=...")
            .with_field("conv_id"));
  if (request.method == "DELETE") {
    response_store_.erase(caller.tenant, kept_as(id));
    HttpResponse r;
    r.status = 204;
    r.content_type.clear();
    return r;
  }
  size_t from = 0;
  const std::string_view text = query_parameter(request.query, "from");
  if (const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), from);
      !text.empty() && (error != std::errc() || end != text.data() + text.size()))
    return error_response(
        invalid_argument(cat("from is '", text.substr(0, 40), "'; it must be a number of bytes")).with_field("from"));
  const auto kept = response_store_.find(caller.tenant, kept_as(id));
  if (!kept)
    return error_response(not_found(cat("there is no stream of the conversation '", id.substr(0, 100),
                                        "'. It was never kept (--response-store), was ended, or made room for others"))
                              .with_field("conv_id"));
  return kept->background->follow(0, headers_of(request, caller, kept->input), from);
}

}  // namespace kvasir::server::http
