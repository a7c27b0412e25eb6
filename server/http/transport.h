// Bytes to and from one client, plain or TLS, with a time limit on each wait. What is built on it is
// compiled once and knows neither.
#pragma once

#include <atomic>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace kvasir::server::http {

// Each connection lives on one io_context that one thread runs, so nothing here needs a lock.
using Executor = boost::asio::io_context::executor_type;
template <class T>
using Task = boost::asio::awaitable<T, Executor>;
using Socket = boost::asio::basic_stream_socket<boost::asio::ip::tcp, Executor>;
using Timer = boost::asio::basic_waitable_timer<std::chrono::steady_clock,
                                                boost::asio::wait_traits<std::chrono::steady_clock>, Executor>;
using TlsContext = std::shared_ptr<boost::asio::ssl::context>;

class Transport {
 public:
  virtual ~Transport() = default;

  // Both give up (0, false) when the other end has gone or the time is over.
  virtual Task<size_t> read(char* to, size_t capacity, std::chrono::milliseconds limit) = 0;
  virtual Task<bool> write(std::string_view bytes, std::chrono::milliseconds limit) = 0;
  virtual Task<void> close() = 0;  // says goodbye first: what was written arrives
  virtual void interrupt() = 0;    // ends a read or write in progress
  virtual std::string peer() const = 0;

  // Until unwatch(): calls `gone` once if the other end closes while nobody reads. What it sends is kept for read().
  virtual void watch(std::function<void()> gone) = 0;
  virtual void unwatch() = 0;
};

std::unique_ptr<Transport> plain_transport(Socket socket);
// Null when the handshake fails or takes too long.
Task<std::unique_ptr<Transport>> tls_transport(Socket socket, TlsContext tls, std::chrono::milliseconds limit);

// Wakes a coroutine from any thread: cancelling the timer is the signal, the flag keeps one that came early.
class Doorbell : public std::enable_shared_from_this<Doorbell> {
 public:
  explicit Doorbell(Executor executor) : timer_(executor) {}
  void ring();
  Task<void> wait();

 private:
  Timer timer_;
  std::atomic<bool> rung_{false};
};

}  // namespace kvasir::server::http
