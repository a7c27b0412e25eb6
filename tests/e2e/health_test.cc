// `kvasir health` as a container would run it: by HTTP and by gRPC, plain, over TLS, and with a certificate of its own.
#include <gtest/gtest.h>
#include <unistd.h>

#include "tests/e2e/server_process.h"
#include "tests/server/tls_files.h"

namespace kvasir::e2e {
namespace {

constexpr const char* kModel = "dummy:llama,layers=1,hidden=64,heads=1,kv_heads=1,head_dim=64,ffn=64,vocab=260";

int health(const std::string& flags) {
  std::string command = std::string(KVASIR_EXE) + " health --timeout 20 " + flags + " >/dev/null 2>&1";
  return WEXITSTATUS(std::system(command.c_str()));
}

std::vector<std::string> serve(std::vector<std::string> more) {
  std::vector<std::string> all{"--model", kModel, "--kv-memory", "1MiB", "--threads", "1"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

TEST(Health, PlainOnBothPorts) {
  ServerProcess server(serve({}));
  ASSERT_TRUE(server.ready()) << server.log();
  std::string http = "--http " + std::to_string(server.http_port()),
              grpc = "--grpc " + std::to_string(server.grpc_port());
  EXPECT_EQ(health(http), 0);
  EXPECT_EQ(health(http + " --live"), 0);
  EXPECT_EQ(health(grpc), 0);
  EXPECT_EQ(health(grpc + " --service vllm.grpc.engine.VllmEngine"), 0);
  EXPECT_EQ(health(grpc + " --service no.such.Service"), 1);
  EXPECT_EQ(health(grpc + " --live"), 2);
  EXPECT_EQ(health(http + " --tls-cert x.pem"), 2);
  server.signal(SIGTERM);
  EXPECT_EQ(server.wait(), 0);
  EXPECT_EQ(health(http + " --timeout 1"), 1);
  EXPECT_EQ(health(grpc + " --timeout 1"), 1);
}

// An address with colons has brackets in a Host header, without which a server without keys refuses it.
TEST(Health, OfAnAddressWithColons) {
  if (access("/proc/net/if_inet6", F_OK) != 0) GTEST_SKIP() << "no IPv6 here";
  ServerProcess server(serve({"--host", "::1"}));
  ASSERT_TRUE(server.ready()) << server.log();
  for (const std::string host : {"--host ::1", "--host '[::1]'"}) {
    EXPECT_EQ(health(host + " --http " + std::to_string(server.http_port())), 0) << host;
    EXPECT_EQ(health(host + " --grpc " + std::to_string(server.grpc_port())), 0) << host;
  }
}

TEST(Health, OverTlsItNeedsTheRightRootAndItsOwnCertificate) {
  server::TlsFiles files;
  for (const char* who : {"server", "client", "stranger"}) files.make(who);
  ServerProcess server(serve({"--tls-cert", files.path("server.pem"), "--tls-key", files.path("server.key"),
                              "--tls-client-ca", files.path("client.pem")}));
  ASSERT_TRUE(server.ready()) << server.log();
  std::string http = "--http " + std::to_string(server.http_port()),
              grpc = "--grpc " + std::to_string(server.grpc_port()), root = " --tls-ca " + files.path("server.pem");
  auto own = [&](const std::string& who) {
    return " --tls-cert " + files.path(who + ".pem") + " --tls-key " + files.path(who + ".key");
  };
  for (const std::string& port : {http, grpc}) {
    EXPECT_EQ(health(port + root + own("client")), 0) << port;
    EXPECT_EQ(health(port + root + " --timeout 2"), 1) << port;
    EXPECT_EQ(health(port + root + own("stranger") + " --timeout 2"), 1) << port;
    EXPECT_EQ(health(port + " --tls-ca " + files.path("stranger.pem") + own("client") + " --timeout 2"), 1) << port;
    EXPECT_EQ(health(port + " --timeout 2"), 1) << port;
  }
}

}  // namespace
}  // namespace kvasir::e2e
