// HTTP as the handlers see it: plain values in and out, no socket and no parser of any library.
// A handler answers at once (Response) or bit by bit (Producer); server/http/connection.cc does the rest.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace kvasir::server::http {

struct HttpRequest {
  std::string method;  // "POST"
  std::string path;    // without the query
  std::string query;
  std::vector<std::pair<std::string, std::string>> headers;  // names in lower case
  std::string body;
  std::string peer;  // address of the other end

  std::string_view header(std::string_view lower_case_name) const {
    for (const auto& [name, value] : headers)
      if (name == lower_case_name) return value;
    return {};
  }
};

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  std::vector<std::pair<std::string, std::string>> headers;
  std::string body;
};

// A reply that grows. poll() does what can be done without waiting; nothing here blocks.
class Producer {
 public:
  enum class Progress {
    waiting,   // call again after on_ready's callback
    writable,  // take() has bytes
    done,      // the last bytes are in take()
  };
  virtual ~Producer() = default;  // destroying it gives up the work behind it

  virtual Progress poll() = 0;
  // Valid once poll() has not said `waiting`; `streams` false means take() is a whole body, ready when done.
  virtual const HttpResponse& head() const = 0;
  virtual bool streams() const = 0;
  virtual std::string take() = 0;
  // Called from any thread, possibly at once; must only signal.
  virtual void on_ready(std::function<void()> callback) = 0;
};

using Reply = std::variant<HttpResponse, std::unique_ptr<Producer>>;

// What is decided by a request's header alone, before any of its body is read.
struct Admission {
  std::optional<HttpResponse> refusal;              // said at once
  std::function<Reply(const HttpRequest&)> answer;  // else: of the whole request
  bool at_once = false;  // neither works nor waits: answered where the bytes are read, whatever the workers do
  std::string owner;     // who it is done for: owners take turns on the workers, and share the memory
};
using Handler = std::function<Admission(const HttpRequest& head)>;

}  // namespace kvasir::server::http
