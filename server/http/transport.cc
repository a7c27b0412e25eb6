#include "server/http/transport.h"

#include <sys/socket.h>

#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/asio/use_awaitable.hpp>

namespace kvasir::server::http {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;
constexpr asio::use_awaitable_t<Executor> kAwait;

// True when the other end has closed; false when it merely sent something ahead of its turn.
bool peer_closed(Socket& socket) {
  char byte;
  ssize_t n = ::recv(socket.native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK);
}

// Stream is Socket, or TLS over it.
template <class Stream>
class TransportOver final : public Transport {
 public:
  explicit TransportOver(Stream stream) : stream_(std::move(stream)), timer_(stream_.get_executor()) {
    error_code ignored;
    socket().set_option(asio::ip::tcp::no_delay(true), ignored);
  }
  ~TransportOver() override { ++*turn_; }

  Task<size_t> read(char* to, size_t capacity, std::chrono::milliseconds limit) override {
    error_code error;
    Alarm alarm(*this, limit);
    co_return co_await stream_.async_read_some(asio::buffer(to, capacity), asio::redirect_error(kAwait, error));
  }

  Task<bool> write(std::string_view bytes, std::chrono::milliseconds limit) override {
    error_code error;
    Alarm alarm(*this, limit);
    while (!bytes.empty() && !error) {
      size_t n = co_await stream_.async_write_some(asio::buffer(bytes), asio::redirect_error(kAwait, error));
      bytes.remove_prefix(n);
      alarm.reset();  // the limit is on one write that makes no progress
    }
    co_return !error;
  }

  Task<void> close() override {
    using namespace std::chrono_literals;
    error_code error;
    if constexpr (!std::is_same_v<Stream, Socket>) {
      Alarm alarm(*this, 1s);
      co_await stream_.async_shutdown(asio::redirect_error(kAwait, error));
    }
    socket().shutdown(Socket::shutdown_send, error);
    // Read what is still on its way, for a moment: a reset would destroy our last bytes in its buffers.
    char sink[4096];
    Alarm alarm(*this, 1s);
    for (int i = 0; i < 256 && !error; ++i)
      co_await socket().async_read_some(asio::buffer(sink), asio::redirect_error(kAwait, error));
    socket().close(error);
  }

  void interrupt() override {
    error_code ignored;
    socket().cancel(ignored);
  }

  std::string peer() const override {
    error_code ignored;
    auto endpoint = const_cast<TransportOver*>(this)->socket().remote_endpoint(ignored);
    return endpoint.address().to_string(ignored);
  }

  void watch(std::function<void()> gone) override {
    socket().async_wait(Socket::wait_read,
                        [this, now = *turn_, turn = turn_, gone = std::move(gone)](error_code error) {
                          if (*turn == now && error != asio::error::operation_aborted && peer_closed(socket())) gone();
                        });
  }
  void unwatch() override {
    ++*turn_;
    error_code ignored;
    socket().cancel(ignored);
  }

 private:
  Socket& socket() {
    if constexpr (std::is_same_v<Stream, Socket>)
      return stream_;
    else
      return stream_.next_layer();
  }

  // Closes the socket when time is over, which ends whatever waits on it.
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

  Stream stream_;
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
