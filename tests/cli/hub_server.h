// A small HTTP server for tests of downloads: answers come from a function, and may be cut or spoken in TLS.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <openssl/ssl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/cat.h"

namespace kvasir::hub {

struct Asked {
  std::string target;
  std::map<std::string, std::string> fields;  // names in lower case
  std::string field(const std::string& name) const {
    auto it = fields.find(name);
    return it == fields.end() ? "" : it->second;
  }
};
struct Reply {
  int status = 200;
  std::vector<std::string> fields;
  std::string body;
  size_t cut = std::string::npos;  // end the connection after so much of the body
  bool chunked = false;
};

class HubServer {
 public:
  using Handler = std::function<Reply(const Asked&)>;
  explicit HubServer(Handler handler, SSL_CTX* tls = nullptr) : handler_(std::move(handler)), tls_(tls) {
    listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in a{};
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::bind(listener_, reinterpret_cast<sockaddr*>(&a), sizeof a) != 0 || ::listen(listener_, 16) != 0)
      ADD_FAILURE() << "no port to listen on";
    socklen_t size = sizeof a;
    ::getsockname(listener_, reinterpret_cast<sockaddr*>(&a), &size);
    port_ = ntohs(a.sin_port);
    thread_ = std::thread([this] { serve(); });
  }
  ~HubServer() {
    ::shutdown(listener_, SHUT_RDWR);
    thread_.join();
    ::close(listener_);
  }
  std::string url() const { return cat(tls_ ? "https" : "http", "://127.0.0.1:", port_); }
  std::vector<Asked> asked() const {
    std::lock_guard lock(mutex_);
    return asked_;
  }

 private:
  void serve() {
    for (int fd; (fd = ::accept(listener_, nullptr, nullptr)) >= 0; ::close(fd)) {
      SSL* tls = tls_ ? SSL_new(tls_) : nullptr;
      if (tls) SSL_set_fd(tls, fd);
      if (!tls || SSL_accept(tls) == 1) answer(fd, tls);
      if (tls) SSL_shutdown(tls), SSL_free(tls);
    }
  }
  void answer(int fd, SSL* tls) {
    std::string text;
    char buffer[4096];
    while (text.find("\r\n\r\n") == std::string::npos) {
      auto n = tls ? SSL_read(tls, buffer, sizeof buffer) : ::recv(fd, buffer, sizeof buffer, 0);
      if (n <= 0) return;
      text.append(buffer, size_t(n));
    }
    Asked asked = parse(text);
    Reply r = handler_(asked);
    {
      std::lock_guard lock(mutex_);
      asked_.push_back(asked);
    }
    std::string out = cat("HTTP/1.1 ", r.status, " x\r\n");
    for (const std::string& f : r.fields) out += f + "\r\n";
    std::string body = r.body.substr(0, r.cut);
    if (r.chunked) {
      out += "Transfer-Encoding: chunked\r\n\r\n";
      for (size_t i = 0; i < body.size(); i += 1000) {
        std::string piece = body.substr(i, 1000);
        std::snprintf(buffer, sizeof buffer, "%zx\r\n", piece.size());
        out += buffer + piece + "\r\n";
      }
      out += "0\r\n\r\n";
    } else {
      out += cat("Content-Length: ", r.body.size(), "\r\n\r\n", body);
    }
    for (size_t at = 0; at < out.size();) {
      size_t most = std::min<size_t>(out.size() - at, 3000);  // heads and bodies come in pieces
      auto n = tls ? SSL_write(tls, out.data() + at, int(most)) : ::send(fd, out.data() + at, most, MSG_NOSIGNAL);
      if (n <= 0) return;
      at += size_t(n);
    }
  }
  static Asked parse(const std::string& text) {
    Asked out;
    size_t space = text.find(' ');
    out.target = text.substr(space + 1, text.find(' ', space + 1) - space - 1);
    for (size_t at = text.find("\r\n") + 2; text[at] != '\r'; at = text.find("\r\n", at) + 2) {
      size_t colon = text.find(": ", at);
      std::string name = text.substr(at, colon - at);
      for (char& c : name) c = char(std::tolower(c));
      out.fields[name] = text.substr(colon + 2, text.find("\r\n", at) - colon - 2);
    }
    return out;
  }

  Handler handler_;
  SSL_CTX* tls_;
  int listener_ = -1, port_ = 0;
  std::thread thread_;
  mutable std::mutex mutex_;
  std::vector<Asked> asked_;
};

}  // namespace kvasir::hub
