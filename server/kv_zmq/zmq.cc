#include "server/kv_zmq/zmq.h"

#include <dlfcn.h>

#include <charconv>

#include "core/cat.h"

namespace kvasir::server {
namespace {

// Of zmq.h, whose numbers are part of the library's binary interface.
constexpr int kPub = 1, kRouter = 6, kMore = 2, kReceiveMore = 13, kLinger = 17, kSendLimit = 23, kReceiveTime = 27,
              kSendTime = 28;
constexpr const char* kLibrary = "libzmq.so.5";
constexpr size_t kLargestFrame = 256;  // what peers send us are identities and numbers

bool listens(const std::string& address) {
  return address.find('*') != std::string::npos || address.find("[::]") != std::string::npos ||
         address.rfind("ipc://", 0) == 0;
}

}  // namespace

struct Zmq::Calls {
  void* (*ctx_new)() = nullptr;
  int (*ctx_term)(void*) = nullptr;
  void* (*socket)(void*, int) = nullptr;
  int (*close)(void*) = nullptr;
  int (*bind)(void*, const char*) = nullptr;
  int (*connect)(void*, const char*) = nullptr;
  int (*setsockopt)(void*, int, const void*, size_t) = nullptr;
  int (*getsockopt)(void*, int, void*, size_t*) = nullptr;
  int (*send)(void*, const void*, size_t, int) = nullptr;
  int (*recv)(void*, void*, size_t, int) = nullptr;
  int (*error)() = nullptr;
  const char* (*text)(int) = nullptr;
};

Zmq::Zmq() : calls_(std::make_unique<Calls>()) {}

Result<std::unique_ptr<Zmq>> Zmq::open() {
  void* library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (!library)
    return failed_precondition(
        cat("kv_events needs ", kLibrary, ", which was not found; install libzmq5 (Debian), or leave kv_events empty"));
  std::unique_ptr<Zmq> out(new Zmq);
  bool all = true;
  auto find = [&](auto& f, const char* name) {
    f = reinterpret_cast<std::decay_t<decltype(f)>>(::dlsym(library, name));
    all &= f != nullptr;
  };
  Calls& c = *out->calls_;
  find(c.ctx_new, "zmq_ctx_new"), find(c.ctx_term, "zmq_ctx_term"), find(c.socket, "zmq_socket"),
      find(c.close, "zmq_close");
  find(c.bind, "zmq_bind"), find(c.connect, "zmq_connect"), find(c.setsockopt, "zmq_setsockopt");
  find(c.getsockopt, "zmq_getsockopt"), find(c.send, "zmq_send"), find(c.recv, "zmq_recv");
  find(c.error, "zmq_errno"), find(c.text, "zmq_strerror");
  if (!all) return failed_precondition(cat("the ", kLibrary, " that was found lacks functions; version 4 is needed"));
  out->context_ = c.ctx_new();
  if (!out->context_) return out->refusal("ZeroMQ does not start");
  return out;
}

Zmq::~Zmq() {
  if (context_) calls_->ctx_term(context_);
}

Status Zmq::refusal(const std::string& what) const {
  return unavailable(cat(what, ": ", calls_->text(calls_->error())));
}

Result<std::unique_ptr<Zmq::Socket>> Zmq::socket(Kind kind, Limits limits) {
  void* made = calls_->socket(context_, kind == Kind::pub ? kPub : kRouter);
  if (!made) return refusal("ZeroMQ makes no socket");
  std::unique_ptr<Socket> out(new Socket(*this, made));
  const int linger = 0, send_ms = 1000;
  for (const auto& [option, value] : {std::pair{kSendLimit, limits.messages},
                                      {kReceiveTime, limits.receive_ms},
                                      {kLinger, linger},
                                      {kSendTime, send_ms}})
    if (calls_->setsockopt(made, option, &value, sizeof value) != 0) return refusal("ZeroMQ refuses an option");
  return out;
}

Zmq::Socket::~Socket() { zmq_.calls_->close(socket_); }

Status Zmq::Socket::attach(const std::string& address) {
  const auto how = listens(address) ? zmq_.calls_->bind : zmq_.calls_->connect;
  return how(socket_, address.c_str()) == 0 ? Status() : zmq_.refusal(cat("'", address, "' cannot be used"));
}

bool Zmq::Socket::send(const std::vector<std::string_view>& frames) {
  for (size_t i = 0; i < frames.size(); ++i)
    if (zmq_.calls_->send(socket_, frames[i].data(), frames[i].size(), i + 1 < frames.size() ? kMore : 0) < 0)
      return false;
  return true;
}

bool Zmq::Socket::receive(std::vector<std::string>* frames) {
  frames->clear();
  for (int more = 1; more;) {
    char buffer[kLargestFrame];
    const int size = zmq_.calls_->recv(socket_, buffer, sizeof buffer, 0);
    if (size < 0) return false;
    // A longer frame is cut, and more frames than anybody sends are left away: neither is an answer to us.
    if (frames->size() < 8) frames->emplace_back(buffer, std::min(size_t(size), sizeof buffer));
    size_t bytes = sizeof more;
    if (zmq_.calls_->getsockopt(socket_, kReceiveMore, &more, &bytes) != 0) return false;
  }
  return true;
}

Status check_zmq_address(const std::string& address) {
  if (address.rfind("ipc://", 0) == 0 && address.size() > 6) return {};
  const size_t colon = address.rfind(':');
  int port = 0;
  if (address.rfind("tcp://", 0) == 0 && colon > 6 && colon != std::string::npos) {
    const char *begin = address.data() + colon + 1, *end = address.data() + address.size();
    auto [stop, wrong] = std::from_chars(begin, end, port);
    if (wrong == std::errc() && stop == end && port >= 1 && port <= 65535) return {};
  }
  return invalid_argument(
      cat("is '", address.substr(0, 100), "'; it must be tcp://*:PORT, tcp://HOST:PORT or ipc://FILE"));
}

}  // namespace kvasir::server
