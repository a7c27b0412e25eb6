// `kvasir health` as a container would run it: by HTTP and by gRPC, plain, over TLS, and with a certificate of its own.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
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

// As a container's health check asks: by the server's own flags, environment and file, whatever else they say.
class HealthOfProcess : public testing::Test {
 protected:
  // A port that nobody has now: a server that took any would not know it from its configuration.
  static std::string free_port() {
    sockaddr_in address{};
    address.sin_family = AF_INET, address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    const int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT_EQ(bind(s, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(getsockname(s, reinterpret_cast<sockaddr*>(&address), &size), 0);
    close(s);
    return std::to_string(ntohs(address.sin_port));
  }
  static int of(const ServerProcess& server, const std::string& more = "") {
    return health("--pid " + std::to_string(server.pid()) + " " + more);
  }
  server::TlsFiles files_;
};

TEST_F(HealthOfProcess, ByItsFlags) {
  ServerProcess server(serve({"--http-port", free_port()}));
  ASSERT_TRUE(server.ready()) << server.log();
  EXPECT_EQ(of(server), 0);
  EXPECT_EQ(of(server, "--live"), 0);
  EXPECT_EQ(of(server, "--http 8000"), 2);
  EXPECT_EQ(of(server, "--grpc 50051"), 2);
  EXPECT_EQ(of(server, "--tls-ca x.pem"), 2);
  server.signal(SIGKILL);
  server.wait();
  EXPECT_EQ(health("--pid 1 --timeout 1"), 1);  // whatever it is, it is no server of ours
}

TEST_F(HealthOfProcess, WithGrpcAloneOrAFreePort) {
  ServerProcess grpc(serve({"--http-port", "-1", "--grpc-port", free_port()}));
  ASSERT_TRUE(grpc.ready()) << grpc.log();
  EXPECT_EQ(of(grpc), 0);
  EXPECT_EQ(of(grpc, "--live"), 1);
  ServerProcess free(serve({}));
  ASSERT_TRUE(free.ready()) << free.log();
  EXPECT_EQ(of(free), 1);
}

TEST_F(HealthOfProcess, ByItsEnvironmentAndItsFileOverTls) {
  files_.make("server");
  files_.write("serve.json",
               cat(R"({"host": "0.0.0.0", "allow_no_keys": true, "grpc_port": 0, "http_port": )", free_port(), "}"));
  setenv("KVASIR_TLS_CERT", files_.path("server.pem").c_str(), 1);
  setenv("KVASIR_TLS_KEY", files_.path("server.key").c_str(), 1);
  setenv("KVASIR_HOST", "", 1);
  std::vector<std::string> flags = serve({"--config", files_.path("serve.json"), "--allow-no-keys"});
  ServerProcess http(flags, {});
  ServerProcess grpc(serve({"--allow-no-keys", "--http-port", "-1", "--grpc-port", free_port()}));
  EXPECT_TRUE(http.ready()) << http.log();
  EXPECT_TRUE(grpc.ready()) << grpc.log();
  EXPECT_EQ(of(http), 0);  // with the same variables around it, as in a container
  for (const char* name : {"KVASIR_TLS_CERT", "KVASIR_TLS_KEY", "KVASIR_HOST"}) unsetenv(name);
  EXPECT_EQ(of(http), 0);
  EXPECT_EQ(of(grpc), 0);
}

TEST_F(HealthOfProcess, WithClientCertificatesItShowsTheServersOwnOrWhatItIsGiven) {
  for (const char* who : {"server", "client"}) files_.make(who);
  const std::string client = "--tls-cert " + files_.path("client.pem") + " --tls-key " + files_.path("client.key");
  for (const bool http : {true, false}) {
    for (const std::string trusted : {"server", "client"}) {
      ServerProcess server(
          serve({http ? "--http-port" : "--grpc-port", free_port(), http ? "--grpc-port" : "--http-port", "-1",
                 "--tls-cert", files_.path("server.pem"), "--tls-key", files_.path("server.key"), "--tls-client-ca",
                 files_.path(trusted + ".pem")}));
      ASSERT_TRUE(server.ready()) << server.log();
      EXPECT_EQ(of(server, "--timeout 2"), trusted == "server" ? 0 : 1);
      EXPECT_EQ(of(server, client + " --timeout 2"), trusted == "client" ? 0 : 1);
    }
  }
}

}  // namespace
}  // namespace kvasir::e2e
