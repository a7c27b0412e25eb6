#include "cli/http_get.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <charconv>
#include <cstring>

#include "cli/socket.h"
#include "core/cat.h"

namespace kvasir::cli {

static constexpr size_t kMostBytes = 1 << 20;

Result<HttpReply> http_get(const std::string& host, int port, const std::string& path,
                           std::chrono::milliseconds limit) {
  Deadline until = std::chrono::steady_clock::now() + limit;
  KVASIR_ASSIGN(Socket s, connect_to(host, port, until));
  std::string ask = cat("GET ", path, " HTTP/1.0\r\nHost: ", host, "\r\nConnection: close\r\n\r\n");
  if (send(s.fd(), ask.data(), ask.size(), MSG_NOSIGNAL) != ssize_t(ask.size()))
    return unavailable(std::strerror(errno));
  std::string text;
  char buffer[4096];
  for (;;) {
    KVASIR_TRY(s.wait(POLLIN, until));
    ssize_t n = recv(s.fd(), buffer, sizeof buffer, 0);
    if (n < 0) return unavailable(std::strerror(errno));
    if (n == 0) break;
    text.append(buffer, size_t(n));
    if (text.size() > kMostBytes) return unavailable("the answer is larger than a health answer can be");
  }
  HttpReply reply;
  size_t space = text.find(' '), head = text.find("\r\n\r\n");
  if (text.rfind("HTTP/1.", 0) != 0 || space == std::string::npos || head == std::string::npos)
    return unavailable("what answers there does not speak HTTP (TLS? another service?)");
  std::from_chars(text.data() + space + 1, text.data() + text.size(), reply.status);
  reply.body = text.substr(head + 4);
  return reply;
}

}  // namespace kvasir::cli
