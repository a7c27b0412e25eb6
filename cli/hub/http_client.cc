#include "cli/hub/http_client.h"

#include <algorithm>
#include <boost/beast/http/buffer_body.hpp>
#include <boost/beast/http/parser.hpp>
#include <vector>

#include "cli/hub/connection.h"
#include "core/cat.h"

namespace kvasir::hub {
namespace {

namespace http = boost::beast::http;
constexpr size_t kBuffer = size_t(256) << 10;
constexpr uint32_t kMostHead = 64 << 10;  // signed addresses in Location headers are long

std::string request_text(const Url& url, const std::string& token, int64_t from_byte) {
  std::string host = url.origin().substr(url.tls ? 8 : 7);
  std::string out = cat("GET ", url.target, " HTTP/1.1\r\nHost: ", host,
                        "\r\nUser-Agent: kvasir\r\nAccept: */*\r\nAccept-Encoding: identity\r\nConnection: close\r\n");
  if (!token.empty()) out += cat("Authorization: Bearer ", token, "\r\n");
  if (from_byte > 0) out += cat("Range: bytes=", from_byte, "-\r\n");
  return out + "\r\n";
}

// One answer, read as it arrives.
class Answer {
 public:
  explicit Answer(Connection& from) : from_(from), room_(kBuffer), out_(kBuffer) {
    parser_.header_limit(kMostHead);
    parser_.body_limit(boost::none);
  }

  Status read_head() {
    while (!parser_.is_header_done()) KVASIR_TRY(more(nullptr));
    return {};
  }
  int status() const { return int(parser_.get().result_int()); }
  std::string field(http::field name) const { return std::string(parser_.get()[name]); }
  HttpHead head() const {
    HttpHead out{status(), -1, field(http::field::content_range)};
    if (auto length = parser_.content_length()) out.length = int64_t(*length);
    return out;
  }
  Status read_body(const HttpClient::OnBody& body) {
    while (!parser_.is_done()) KVASIR_TRY(more(&body));
    return {};
  }

 private:
  // Feeds the parser what is there, or what comes next. Without `body` it stops where the head ends.
  Status more(const HttpClient::OnBody* body) {
    boost::system::error_code error;
    if (begin_ == end_ || starved_) {
      std::copy(room_.begin() + int64_t(begin_), room_.begin() + int64_t(end_), room_.begin());
      end_ -= begin_, begin_ = 0;
      if (end_ == room_.size()) return unavailable("what answers there does not speak HTTP");
      KVASIR_ASSIGN(size_t n, from_.read(room_.data() + end_, room_.size() - end_));
      end_ += n, starved_ = false;
      if (n == 0) {
        parser_.put_eof(error);
        return error ? unavailable("the connection ended in the middle of an answer") : Status();
      }
    }
    auto& to = parser_.get().body();
    to.data = out_.data(), to.size = out_.size(), to.more = true;
    parser_.eager(body != nullptr);
    begin_ += parser_.put(boost::asio::buffer(room_.data() + begin_, end_ - begin_), error);
    starved_ = error == http::error::need_more;
    if (error && error != http::error::need_buffer && !starved_)
      return unavailable(cat("what answers there does not speak HTTP: ", error.message()));
    size_t got = out_.size() - to.size;
    return body && got > 0 ? (*body)({out_.data(), got}) : Status();
  }

  Connection& from_;
  http::response_parser<http::buffer_body> parser_;
  std::vector<char> room_, out_;
  size_t begin_ = 0, end_ = 0;
  bool starved_ = false;  // what is there is less than the parser can use
};

}  // namespace

Status refusal(int status, std::string_view what) {
  switch (status) {
    case 401:
    case 403:
      return {Code::permission_denied,
              cat(what, " may not be read (HTTP ", status,
                  "): set HF_TOKEN to a token that may, and accept the model's terms on its page")};
    case 404: return not_found(cat(what, " does not exist there (HTTP 404), or HF_TOKEN is needed to see it"));
    case 429: return resource_exhausted(cat(what, ": the other side asks to wait (HTTP 429); try again later"));
    default: return unavailable(cat(what, ": the other side answered HTTP ", status));
  }
}

Status HttpClient::get(const Url& url, int64_t from_byte, const OnHead& head, const OnBody& body) const {
  Url at = url;
  for (int hop = 0;; ++hop) {
    KVASIR_ASSIGN(Connection connection, Connection::open(at, options_.patience));
    KVASIR_TRY(connection.write(request_text(at, at.same_origin(url) ? options_.token : "", from_byte)));
    Answer answer(connection);
    KVASIR_TRY(answer.read_head());
    int status = answer.status();
    std::string location = answer.field(http::field::location);
    if (status < 300 || status >= 400 || location.empty()) {
      KVASIR_TRY(head(answer.head()));
      return answer.read_body(body);
    }
    if (hop == options_.redirects) return unavailable(cat(url.origin(), " redirects more than ", hop, " times"));
    KVASIR_ASSIGN(at, redirected(at, location));
  }
}

Result<std::string> HttpClient::get_text(const Url& url, size_t limit) const {
  std::string out;
  auto head = [&](const HttpHead& h) {
    return h.status == 200 ? Status() : refusal(h.status, cat(url.origin(), url.target));
  };
  KVASIR_TRY(get(url, 0, head, [&](std::string_view piece) {
    out += piece;
    return out.size() <= limit ? Status()
                               : unavailable(cat("the answer of ", url.origin(), " is longer than ", limit, " bytes"));
  }));
  return out;
}

}  // namespace kvasir::hub
