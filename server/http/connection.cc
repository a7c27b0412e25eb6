#include "server/http/connection.h"

#include <atomic>
#include <boost/asio/buffer.hpp>
#include <boost/beast/core/string.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <optional>

#include "core/awaited.h"
#include "core/cat.h"
#include "server/http/error_body.h"

namespace kvasir::server::http {
namespace {

namespace asio = boost::asio;
namespace wire = boost::beast::http;
using boost::system::error_code;

const char* reason(int status) {
  return wire::obsolete_reason(static_cast<wire::status>(status)).data();  // a literal
}

constexpr size_t kMostUnread = 16 << 10;  // of a body of which nothing is made: refused by its header, or open to all

// A request that is being answered. The worker has a share of it: the connection may end meanwhile.
struct Exchange {
  HttpRequest request;
  Admission admission;
  ByteBudget::Share share;
  std::optional<Reply> reply;
  std::atomic<bool> ready{false}, gone{false};
};

class Connection {
 public:
  Connection(std::unique_ptr<Transport> transport, const ConnectionContext& context, IdleSet& idle, Executor executor)
      : transport_(std::move(transport)),
        context_(context),
        idle_(idle),
        executor_(executor),
        peer_(transport_->peer()) {}

  Task<void> run() {
    for (bool more = true; more;) more = co_await one_exchange();
    co_await transport_->close();
  }

 private:
  using Parser = wire::request_parser<wire::string_body>;
  enum class Part : uint8_t { header, body };
  static constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
  const ConnectionLimits& limits() const { return context_.limits; }

  // Each co_await stands in a statement of its own: gcc 12 miscompiles them inside conditions.

  // Reads a request and answers it; true if the connection may carry another.
  Task<bool> one_exchange() {
    Parser parser;
    parser.header_limit(static_cast<uint32_t>(limits().max_header_bytes));
    parser.body_limit(limits().max_body_bytes);
    auto job = std::make_shared<Exchange>();
    bool here = co_await await_request();
    if (!here) co_return false;
    bool read = co_await read_part(parser, Part::header, *job);
    if (read) read = check_head(parser.get());
    if (read) read = admit(parser, *job);
    if (read && wants_continue(parser)) {
      bool sent = co_await transport_->write(kContinue, limits().write_time);
      if (!sent) co_return false;
    }
    parser.eager(true);
    if (read) read = co_await read_part(parser, Part::body, *job);
    if (!read) {
      if (refusal_) co_await write_whole(*refusal_, refusal_->body);
      co_return false;
    }

    keep_ = parser.keep_alive() && !context_.draining() && !context_.spare;
    job->request.body = std::move(parser.get().body());
    Reply reply = HttpResponse();
    if (job->admission.refusal) {
      reply = *std::move(job->admission.refusal);
    } else if (job->admission.at_once) {
      reply = job->admission.answer(job->request);
    } else {
      bool answered = co_await on_worker(job);
      if (!answered) co_return false;
      reply = *std::move(job->reply);
    }
    ByteBudget::Share share = std::move(job->share);
    job.reset();
    share.drop();
    if (context_.draining()) keep_ = false;
    bool more = false;
    if (auto* whole = std::get_if<HttpResponse>(&reply))
      more = co_await write_held(share, *whole, whole->body);
    else
      more = co_await write_produced(*std::get<std::unique_ptr<Producer>>(reply), share);
    co_return more;
  }

  // Who asks, and for what, decides whether the body is read at all: nobody unknown has the server hold megabytes.
  // From here on the header is closed: fields that come after the body are none of it.
  bool admit(const Parser& parser, Exchange& job) {
    chunks_ = parser.get().version() >= 11;
    job.request = plain(parser.get());
    head_only_ = job.request.method == "HEAD";
    job.admission = context_.handler(job.request);
    if (context_.spare && !job.admission.at_once)
      job.admission.refusal = error_response(
          unavailable("the server has as many connections as it may (max_connections); this one is kept for /health")
              .with_retry_after(std::chrono::seconds(1)));
    job.share = ByteBudget::Share(context_.budget, job.admission.owner);
    if (!job.admission.refusal) return true;
    auto length = parser.content_length();
    if (parser.is_done() || (length && *length <= kMostUnread)) return true;  // the connection can go on
    keep_ = false;
    refusal_ = std::move(job.admission.refusal);
    return false;
  }

  // Waits for the first bytes of a request, unless some are here already.
  Task<bool> await_request() {
    bool idle = !first_;
    first_ = false;
    if (!input_.empty()) co_return true;
    if (idle && context_.draining()) co_return false;
    auto limit = idle ? limits().idle_time : limits().header_time;
    idle_.insert(transport_.get());
    bool some = co_await more_input(limit);
    idle_.erase(transport_.get());
    co_return some;
  }

  Task<bool> more_input(std::chrono::milliseconds limit) {
    size_t n = co_await transport_->read(block_, sizeof block_, limit);
    input_.append(block_, n);
    co_return n > 0;
  }

  // Feeds the parser until the part is done; false with a refusal, or without one when nobody is left to read it.
  Task<bool> read_part(Parser& parser, Part part, Exchange& job) {
    auto until = std::chrono::steady_clock::now() + limits().header_time;
    while (!done(parser, part)) {
      error_code error;
      if (!input_.empty()) {
        size_t used = parser.put(asio::buffer(input_), error);
        input_.erase(0, used);
        if (error && error != wire::error::need_more) {
          refuse_malformed(error);
          co_return false;
        }
        bool fits = within_bounds(parser, part, job, used == 0);
        if (!fits) co_return false;
        if (done(parser, part)) break;
        if (!error && used > 0) continue;
      }
      auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
      if (left.count() <= 0) co_return false;  // too slow
      bool some = co_await more_input(left);
      if (!some) co_return false;
    }
    co_return true;
  }
  static bool done(const Parser& parser, Part part) {
    return part == Part::header ? parser.is_header_done() : parser.is_done();
  }

  // The parser takes a chunk's size with its extensions, and the trailers, only when it has all of them: what waits for
  // the rest may be as long as a header, and no longer.
  bool within_bounds(const Parser& parser, Part part, Exchange& job, bool waits) {
    if (part == Part::header) return true;
    if (waits && input_.size() > limits().max_header_bytes)
      return refuse(431, cat("a chunk's extensions, or the trailers, are larger than the limit of ",
                             limits().max_header_bytes, " bytes"));
    const size_t body = parser.get().body().size();
    if (job.admission.at_once && body > kMostUnread)  // nobody was asked for a key, and nothing is made of it
      return refuse(413, cat("nothing is made of a body here; this one is larger than ", kMostUnread, " bytes"));
    Status room = job.share.hold(body);
    if (room.ok()) return true;
    keep_ = false;
    refusal_ = error_response(room);
    return false;
  }

  // Two ways of saying where a message ends, or whom it is for, is how requests are smuggled. A coding that is not
  // undone would leave bytes that look like a mistake of the client's in its JSON.
  bool check_head(const wire::request<wire::string_body>& head) {
    using boost::beast::iequals;
    using wire::field;
    if (head.count(field::transfer_encoding) && head.count(field::content_length))
      return refuse(400, "Content-Length and Transfer-Encoding cannot both be given");
    if (head.count(field::content_length) > 1) return refuse(400, "Content-Length is given more than once");
    if (head.count(field::host) > 1) return refuse(400, "Host is given more than once");
    if (head.count(field::host) == 0 && head.version() >= 11) return refuse(400, "Host is missing");
    const std::string_view transfer = head[field::transfer_encoding], content = head[field::content_encoding];
    if (head.count(field::transfer_encoding) > 1 || (!transfer.empty() && !iequals(transfer, "chunked")))
      return refuse(501, cat("Transfer-Encoding is '", transfer.substr(0, 60), "'; it must be chunked"));
    if (!content.empty() && !iequals(content, "identity"))
      return refuse(415, cat("Content-Encoding is '", content.substr(0, 60), "'; send the body as it is"));
    return true;
  }
  static bool wants_continue(const Parser& parser) {
    return !parser.is_done() && boost::beast::iequals(parser.get()[wire::field::expect], "100-continue");
  }

  HttpRequest plain(const wire::request<wire::string_body>& message) const {
    HttpRequest r;
    r.method = message.method_string();
    std::string_view target(message.target().data(), message.target().size()), authority;
    // As a proxy is asked: the server's name stands in the target, and what Host says does not count.
    if (size_t scheme = target.find("://"); scheme != target.npos && scheme < target.find_first_of("/?")) {
      target.remove_prefix(scheme + 3);
      authority = target.substr(0, target.find_first_of("/?"));
      target.remove_prefix(authority.size());
    }
    size_t mark = target.find('?');
    r.path = target.empty() || mark == 0 ? "/" : target.substr(0, mark);
    if (mark != std::string_view::npos) r.query = target.substr(mark + 1);
    for (const auto& field : message) {
      std::string name(field.name_string());
      for (char& c : name) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c + 32 : c);
      const bool replaced = !authority.empty() && name == "host";
      r.headers.emplace_back(std::move(name), replaced ? std::string(authority) : std::string(field.value()));
    }
    r.peer = peer_;
    return r;
  }

  // False: the client left meanwhile, and its request with it.
  Task<bool> on_worker(std::shared_ptr<Exchange> job) {
    auto doorbell = std::make_shared<Doorbell>(executor_);
    auto work = [job, doorbell] {
      if (job->gone.load(std::memory_order_acquire)) return;
      const Awaited awaited(job->gone);
      job->reply.emplace(job->admission.answer(job->request));
      job->ready.store(true, std::memory_order_release);
      doorbell->ring();
    };
    if (!context_.workers->post(std::move(work), job->admission.owner, job->request.body.size())) {
      job->reply = error_response(resource_exhausted("the server has too many requests to look at; try again")
                                      .with_retry_after(std::chrono::seconds(1)));
      co_return true;
    }
    transport_->watch([job, doorbell] {
      job->gone.store(true, std::memory_order_release);
      doorbell->ring();
    });
    while (!job->ready.load(std::memory_order_acquire) && !job->gone.load(std::memory_order_acquire))
      co_await doorbell->wait();
    transport_->unwatch();
    co_return job->ready.load(std::memory_order_acquire);
  }

  std::string head(const HttpResponse& response, std::optional<size_t> length) const {
    std::string out = cat("HTTP/1.1 ", response.status, ' ', reason(response.status), "\r\n");
    if (!response.content_type.empty()) out += cat("Content-Type: ", response.content_type, "\r\n");
    for (const auto& [name, value] : response.headers) out += cat(name, ": ", value, "\r\n");
    if (length)
      out += cat("Content-Length: ", *length, "\r\n");
    else if (chunks_)
      out += "Transfer-Encoding: chunked\r\n";
    out += keep_ ? "Connection: keep-alive\r\n\r\n" : "Connection: close\r\n\r\n";
    return out;
  }

  Task<bool> write_whole(const HttpResponse& response, const std::string& body) {
    std::string bytes = head(response, body.size());
    if (!head_only_) bytes += body;
    bool sent = co_await transport_->write(bytes, limits().write_time);
    co_return sent&& keep_;
  }

  // A large answer counts for as long as its reader takes.
  Task<bool> write_held(ByteBudget::Share& share, const HttpResponse& response, const std::string& body) {
    Status room = share.hold(body.size());
    if (!room.ok()) {
      HttpResponse refused = error_response(room);
      bool more = co_await write_whole(refused, refused.body);
      co_return more;
    }
    bool more = co_await write_whole(response, body);
    co_return more;
  }

  // What an event stream sends, as one chunk.
  std::string chunk(std::string bytes) const {
    if (!chunks_ || bytes.empty()) return bytes;
    char size[20];
    int n = std::snprintf(size, sizeof size, "%zx\r\n", bytes.size());
    return std::string(size, n) + bytes + "\r\n";
  }

  Task<bool> write_produced(Producer& producer, ByteBudget::Share& share) {
    auto doorbell = std::make_shared<Doorbell>(executor_);
    auto gone = std::make_shared<std::atomic<bool>>(false);
    producer.on_ready([doorbell] { doorbell->ring(); });
    if (!chunks_) keep_ = false;  // HTTP/1.0 knows no chunks: the end is the end of the connection
    bool started = false, watching = false;
    while (true) {
      Producer::Progress progress = producer.poll();
      if (progress == Producer::Progress::waiting) {
        if (!watching) {
          watching = true;
          transport_->watch([doorbell, gone] {
            gone->store(true);
            doorbell->ring();
          });
        }
        co_await doorbell->wait();
        if (gone->load()) co_return false;
        continue;
      }
      bool done = progress == Producer::Progress::done;
      if (done && watching) transport_->unwatch();
      if (!producer.streams()) {
        if (!done) continue;
        std::string body = producer.take();
        bool more = co_await write_held(share, producer.head(), body);
        co_return more;
      }
      std::string bytes;
      if (!started) bytes = head(producer.head(), std::nullopt);
      started = true;
      bytes += chunk(producer.take());
      if (done && chunks_) bytes += "0\r\n\r\n";
      bool sent = co_await transport_->write(bytes, limits().write_time);
      if (!sent) co_return false;
      if (done) co_return keep_;
    }
  }

  bool refuse(int status, std::string message) {
    keep_ = false;
    refusal_ = error_response(status, "invalid_request_error", message);
    return false;
  }

  void refuse_malformed(error_code error) {
    if (error == wire::error::body_limit)
      refuse(413, cat("the body is larger than the limit of ", limits().max_body_bytes, " bytes (max_body)"));
    else if (error == wire::error::header_limit)
      refuse(431, cat("the header is larger than the limit of ", limits().max_header_bytes, " bytes"));
    else
      refuse(400, "this is not HTTP/1.1: " + error.message());
  }

  std::unique_ptr<Transport> transport_;
  const ConnectionContext& context_;
  IdleSet& idle_;
  Executor executor_;
  std::string peer_;
  std::string input_;
  std::optional<HttpResponse> refusal_;
  char block_[16 << 10];
  bool first_ = true, keep_ = false, chunks_ = true, head_only_ = false;
};

}  // namespace

Task<void> serve_connection(std::unique_ptr<Transport> transport, const ConnectionContext& context, IdleSet& idle,
                            Executor executor) {
  auto connection = std::make_unique<Connection>(std::move(transport), context, idle, executor);
  co_await connection->run();
}

}  // namespace kvasir::server::http
