#include "server/http/transport.h"

#include <algorithm>
#include <array>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/asio/use_awaitable.hpp>

namespace kvasir::server::http {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;
constexpr asio::use_awaitable_t<Executor> kAwait;

// Of what a client sends while its answer is on the way: so much is kept for its turn. More is thrown away, which ends
// the connection after that answer; still more ends it at once.
constexpr size_t kMostAhead = 32 << 10, kMostThrownAway = 16 << 20;

// What a read in progress needs: it may outlive the transport that began it.
template <class Stream>
struct Line {
  explicit Line(Stream s) : stream(std::move(s)), arrived(stream.get_executor()) {}
  Socket& socket() {
    if constexpr (std::is_same_v<Stream, Socket>)
      return stream;
    else
      return stream.next_layer();
  }
  Stream stream;
  Timer arrived;
  std::string ahead;  // what came while nobody read
  size_t thrown_away = 0;
  std::unique_ptr<std::array<char, 4096>> block;  // where the next of it goes
  bool reading = false, over = false;
  std::function<void()> gone;  // while somebody wants to know
};

// Stream is Socket, or TLS over it.
template <class Stream>
class TransportOver final : public Transport {
 public:
  explicit TransportOver(Stream stream)
      : line_(std::make_shared<Line<Stream>>(std::move(stream))), timer_(line_->stream.get_executor()) {
    error_code ignored;
    socket().set_option(asio::ip::tcp::no_delay(true), ignored);
  }
  ~TransportOver() override {
    ++*turn_;
    unwatch();
    if (!line_->reading) return;
    error_code ignored;
    socket().cancel(ignored);
  }

  Task<size_t> read(char* to, size_t capacity, std::chrono::milliseconds limit) override {
    error_code error;
    Alarm alarm(*this, limit);
    while (line_->reading && line_->ahead.empty()) co_await some_ahead();
    if (line_->thrown_away > 0) co_return 0;
    if (!line_->ahead.empty()) {
      const size_t n = std::min(capacity, line_->ahead.size());
      std::copy_n(line_->ahead.data(), n, to);
      line_->ahead.erase(0, n);
      co_return n;
    }
    if (line_->over) co_return 0;
    error.clear();
    co_return co_await line_->stream.async_read_some(asio::buffer(to, capacity), asio::redirect_error(kAwait, error));
  }

  Task<bool> write(std::string_view bytes, std::chrono::milliseconds limit) override {
    error_code error;
    Alarm alarm(*this, limit);
    while (!bytes.empty() && !error) {
      size_t n = co_await line_->stream.async_write_some(asio::buffer(bytes), asio::redirect_error(kAwait, error));
      bytes.remove_prefix(n);
      alarm.reset();  // the limit is on one write that makes no progress
    }
    co_return !error;
  }

  Task<void> close() override {
    using namespace std::chrono_literals;
    error_code error;
    unwatch();
    socket().cancel(error);  // a read ahead would take what the goodbye below waits for
    while (line_->reading) co_await some_ahead();
    if constexpr (!std::is_same_v<Stream, Socket>) {
      Alarm alarm(*this, 1s);
      co_await line_->stream.async_shutdown(asio::redirect_error(kAwait, error));
    }
    socket().shutdown(Socket::shutdown_send, error);
    // Read what is still on its way, for a moment: a reset would destroy our last bytes in its buffers.
    char sink[16 << 10];
    Alarm alarm(*this, 1s);
    for (int i = 0; i < 1024 && !error; ++i)
      co_await socket().async_read_some(asio::buffer(sink), asio::redirect_error(kAwait, error));
    socket().close(error);
  }

  void interrupt() override {
    error_code ignored;
    socket().cancel(ignored);
  }

  std::string peer() const override {
    error_code ignored;
    auto endpoint = line_->socket().remote_endpoint(ignored);
    return endpoint.address().to_string(ignored);
  }

  // Only reading finds an end that stands behind other bytes: a goodbye of TLS, or a request that came early.
  void watch(std::function<void()> gone) override {
    if (line_->over) return gone();
    line_->gone = std::move(gone);
    if (!line_->reading) read_ahead(line_);
  }
  void unwatch() override { line_->gone = nullptr; }

 private:
  using LinePtr = std::shared_ptr<Line<Stream>>;
  Socket& socket() { return line_->socket(); }

  Task<void> some_ahead() {
    error_code ignored;
    line_->arrived.expires_at(std::chrono::steady_clock::time_point::max());
    co_await line_->arrived.async_wait(asio::redirect_error(kAwait, ignored));
  }
  static void read_ahead(const LinePtr& line) {
    if (!line->block) line->block = std::make_unique<std::array<char, 4096>>();
    line->reading = true;
    line->stream.async_read_some(asio::buffer(*line->block), [line](error_code error, size_t n) {
      line->reading = false;
      if (line->thrown_away == 0 && line->ahead.size() + n <= kMostAhead)
        line->ahead.append(line->block->data(), n);
      else
        line->thrown_away += n;
      line->over = bool(error);
      line->arrived.cancel();
      if (!line->gone) return;
      if (line->over || line->thrown_away > kMostThrownAway) return std::exchange(line->gone, nullptr)();
      read_ahead(line);
    });
  }

  // Ends whatever waits on the socket when time is over.
  class Alarm {
   public:
    Alarm(TransportOver& t, std::chrono::milliseconds limit) : t_(t), limit_(limit) { reset(); }
    ~Alarm() {
      ++*t_.turn_;
      t_.timer_.cancel();
    }
    void reset() {
      t_.timer_.expires_after(limit_);
      t_.timer_.async_wait([&t = t_, now = *t_.turn_, turn = t_.turn_](error_code error) {
        error_code ignored;
        if (*turn == now && !error) t.socket().cancel(ignored);
      });
    }

   private:
    TransportOver& t_;
    std::chrono::milliseconds limit_;
  };

  LinePtr line_;
  Timer timer_;
  // Goes up when a wait is over: a callback already queued for an earlier one knows that it came too late,
  // also when the transport is gone.
  std::shared_ptr<uint64_t> turn_ = std::make_shared<uint64_t>(0);
};

}  // namespace

std::unique_ptr<Transport> plain_transport(Socket socket) {
  return std::make_unique<TransportOver<Socket>>(std::move(socket));
}

Task<std::unique_ptr<Transport>> tls_transport(Socket socket, TlsContext tls, std::chrono::milliseconds limit) {
  asio::ssl::stream<Socket> stream(std::move(socket), *tls);
  Timer timer(stream.get_executor(), limit);
  auto shaking = std::make_shared<bool>(true);
  timer.async_wait([&stream, shaking](error_code error) {
    error_code ignored;
    if (*shaking && !error) stream.next_layer().cancel(ignored);
  });
  error_code error;
  co_await stream.async_handshake(asio::ssl::stream_base::server, asio::redirect_error(kAwait, error));
  *shaking = false;
  timer.cancel();
  if (error) co_return nullptr;
  co_return std::make_unique<TransportOver<asio::ssl::stream<Socket>>>(std::move(stream));
}

void Doorbell::ring() {
  if (rung_.exchange(true, std::memory_order_acq_rel)) return;
  asio::post(timer_.get_executor(), [self = shared_from_this()] { self->timer_.cancel(); });
}

Task<void> Doorbell::wait() {
  // ring() posts to this thread, so a signal after the check below finds the wait in place.
  if (!rung_.load(std::memory_order_acquire)) {
    error_code ignored;
    timer_.expires_at(std::chrono::steady_clock::time_point::max());
    co_await timer_.async_wait(asio::redirect_error(kAwait, ignored));
  }
  rung_.exchange(false, std::memory_order_acq_rel);
}

}  // namespace kvasir::server::http
