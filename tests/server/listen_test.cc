// Both ports are found at every address of the host.
#include "server/listen.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/server.h"
#include "tests/server/fake_engine.h"

namespace kvasir::server {
namespace {

using testing::HasSubstr;

template <class Address>
bool answers(Address address) {
  int fd = ::socket(reinterpret_cast<sockaddr&>(address).sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  bool connected = ::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  if (fd >= 0) ::close(fd);
  return connected;
}
bool answers_on_four(int port) {
  sockaddr_in a{};
  a.sin_family = AF_INET;
  a.sin_port = htons(uint16_t(port));
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return answers(a);
}
bool answers_on_six(int port) {
  sockaddr_in6 a{};
  a.sin6_family = AF_INET6;
  a.sin6_port = htons(uint16_t(port));
  a.sin6_addr = in6addr_loopback;
  return answers(a);
}
bool has_six() {
  int fd = ::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in6 a{};
  a.sin6_family = AF_INET6;
  a.sin6_addr = in6addr_loopback;
  bool bound = fd >= 0 && ::bind(fd, reinterpret_cast<sockaddr*>(&a), sizeof a) == 0;
  if (fd >= 0) ::close(fd);
  return bound;
}

TEST(Listen, BothPortsAnswerAtEveryAddressOfTheHost) {
  if (!has_six()) GTEST_SKIP() << "this machine has no IPv6";
  for (const auto& [host, four, six] : {std::tuple("127.0.0.1", true, false), std::tuple("::1", false, true),
                                        std::tuple("[::1]", false, true), std::tuple("", true, true)}) {
    SCOPED_TRACE(host);
    FakeEngine engine;
    ServerOptions options;
    options.host = host;
    options.allow_no_keys = true;
    options.grpc_port = options.http_port = 0;
    auto server = Server::start(options, engine);
    ASSERT_TRUE(server.ok()) << server.status().to_string();
    for (int port : {(*server)->grpc_port(), (*server)->http_port()}) {
      EXPECT_EQ(answers_on_four(port), four);
      EXPECT_EQ(answers_on_six(port), six);
    }
  }
}

TEST(Listen, APortThatIsTakenIsSaid) {
  auto first = listen_on("127.0.0.1", 0, "--http-port");
  ASSERT_TRUE(first.ok());
  Status taken = listen_on("127.0.0.1", first->port, "--http-port").status();
  EXPECT_EQ(taken.code(), Code::unavailable);
  EXPECT_THAT(taken.message(), HasSubstr(cat("127.0.0.1:", first->port)));
  EXPECT_THAT(taken.message(), HasSubstr("--http-port"));
  Status other = listen_on("localhost", first->port, "--http-port").status();
  EXPECT_EQ(other.code(), Code::unavailable) << "half a host is no host";
  for (int fd : first->sockets) ::close(fd);
  EXPECT_THAT(listen_on("no such host", 0, "--http-port").status().message(), HasSubstr("no known name"));
}

TEST(Listen, SeveralAddressesShareAPort) {
  if (!has_six()) GTEST_SKIP() << "no IPv6 here";
  auto both = listen_on("127.0.0.1, ::1", 0, "--http-port");
  ASSERT_TRUE(both.ok()) << both.status().to_string();
  EXPECT_EQ(both->sockets.size(), 2u);
  EXPECT_TRUE(answers_on_four(both->port));
  EXPECT_TRUE(answers_on_six(both->port));
  for (int fd : both->sockets) ::close(fd);
  // All of them or none.
  auto one = listen_on("127.0.0.1", 0, "--http-port");
  ASSERT_TRUE(one.ok());
  EXPECT_EQ(listen_on("::1,127.0.0.1", one->port, "--http-port").status().code(), Code::unavailable);
  EXPECT_FALSE(answers_on_six(one->port));
  for (int fd : one->sockets) ::close(fd);
  EXPECT_THAT(listen_on("127.0.0.1,,::1", 0, "--http-port").status().message(), HasSubstr("between two commas"));
}

TEST(Listen, EachAddressMustBeLoopbackWithoutKeys) {
  ServerOptions options;
  options.host = "127.0.0.1,::1";
  EXPECT_TRUE(options.check_open().ok());
  options.host = "127.0.0.1,0.0.0.0";
  EXPECT_FALSE(options.check_open().ok());
}

}  // namespace
}  // namespace kvasir::server
