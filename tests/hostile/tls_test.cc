// TLS as it is tried by those who rotate certificates, by those who leave politely, and by those who want old ciphers.
#include <gmock/gmock.h>
#include <filesystem>

#include "server/server.h"
#include "tests/hostile/hostile.h"
#include "tests/hostile/tls_client.h"
#include "tests/server/fake_engine.h"
#include "tests/server/https_get.h"
#include "tests/server/tls_files.h"

namespace kvasir::server {
namespace {

using namespace std::chrono_literals;

class TlsServed : public testing::Test {
 protected:
  void SetUp() override {
    files_.make("server");
    options_.tls_cert = files_.path("server.pem");
    options_.tls_key = files_.path("server.key");
    options_.grpc_port = options_.http_port = 0;
    options_.access_log = false;
    std::this_thread::sleep_for(1100ms);  // the files have been there for a while
    auto server = Server::start(options_, engine_);
    ASSERT_TRUE(server.ok()) << server.status().message();
    server_ = std::move(*server);
  }
  std::vector<int> ports() { return {server_->http_port(), server_->grpc_port()}; }
  void write_slowly(const std::string& name, const std::string& text, bool both_halves = true) {
    std::ofstream(files_.path(name)) << text.substr(0, text.size() / 2);
    std::this_thread::sleep_for(150ms);
    if (both_halves) std::ofstream(files_.path(name)) << text;
  }

  TlsFiles files_;
  FakeEngine engine_;
  ServerOptions options_;
  std::unique_ptr<Server> server_;
};

// Handshakes on both ports while the files are replaced in every order, in pieces, and by garbage: none fails, and in
// the end the new pair is served.
TEST_F(TlsServed, CertificatesRotatedEveryWay) {
  files_.make("other");
  const std::string pair[2][2] = {{files_.read("server.pem"), files_.read("server.key")},
                                  {files_.read("other.pem"), files_.read("other.key")}};
  files_.write("both.pem", pair[0][0] + pair[1][0]);
  files_.write("first.pem", pair[0][0]);
  files_.write("second.pem", pair[1][0]);
  std::atomic<bool> over{false};
  std::atomic<int> tried{0}, failed{0};
  std::vector<std::thread> clients;
  for (int port : ports())
    clients.emplace_back([&, port] {
      while (!over) {
        TlsClient client(files_.path("both.pem"));
        failed += !client.connect(port);
        ++tried;
        std::this_thread::sleep_for(5ms);
      }
    });
  auto put = [&](const char* name, const std::string& text) { files_.write(name, text); };
  // The key first, as documented; then the certificate, with a pause long enough to be looked at.
  put("server.key", pair[1][1]);
  std::this_thread::sleep_for(1700ms);
  put("server.pem", pair[1][0]);
  std::this_thread::sleep_for(300ms);
  // Back, the certificate first and each in two writes; then garbage.
  write_slowly("server.pem", pair[0][0]);
  write_slowly("server.key", pair[0][1]);
  std::this_thread::sleep_for(300ms);
  put("server.pem", "not a certificate");
  std::this_thread::sleep_for(1700ms);
  write_slowly("server.pem", pair[1][0], false);
  put("server.key", pair[1][1]);
  std::this_thread::sleep_for(100ms);
  put("server.pem", pair[1][0]);
  for (int port : ports()) {
    bool served = false;
    for (int i = 0; i < 600 && !served; ++i) {
      served = TlsClient(files_.path("second.pem")).connect(port);
      if (!served) std::this_thread::sleep_for(20ms);
    }
    EXPECT_TRUE(served);
    EXPECT_FALSE(TlsClient(files_.path("first.pem")).connect(port));
  }
  over = true;
  for (auto& c : clients) c.join();
  EXPECT_EQ(failed, 0) << "of " << tried;
  EXPECT_GT(tried, 20);
}

TEST_F(TlsServed, OnlyCiphersWithForwardSecrecyAndAuthentication) {
  for (int port : ports()) {
    for (const char* refused : {"ECDHE-ECDSA-AES128-SHA", "ECDHE-ECDSA-AES256-SHA384", "AES128-GCM-SHA256",
                                "AES256-SHA", "ECDHE-ECDSA-AES128-SHA256"}) {
      TlsClient client(files_.path("server.pem"));
      client.only(TLS1_2_VERSION, refused);
      EXPECT_FALSE(client.connect(port)) << refused;
    }
    TlsClient good(files_.path("server.pem")), old(files_.path("server.pem")), now(files_.path("server.pem"));
    good.only(TLS1_2_VERSION, "ECDHE-ECDSA-AES128-GCM-SHA256");
    EXPECT_TRUE(good.connect(port));
    old.only(TLS1_1_VERSION, nullptr);
    EXPECT_FALSE(old.connect(port));
    EXPECT_TRUE(now.connect(port));
  }
}

// A key exchange by RSA needs a key of that kind.
TEST_F(TlsServed, NoKeyExchangeByRsaAlone) {
  const std::string command =
      cat("openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=rsa -addext "
          "subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout ",
          files_.path("rsa.key"), " -out ", files_.path("rsa.pem"), " 2>/dev/null");
  ASSERT_EQ(std::system(command.c_str()), 0);
  server_.reset();
  engine_.set_state(engine::State::serving);
  options_.tls_cert = files_.path("rsa.pem");
  options_.tls_key = files_.path("rsa.key");
  auto server = Server::start(options_, engine_);
  ASSERT_TRUE(server.ok());
  server_ = std::move(*server);
  for (int port : ports()) {
    for (const char* refused : {"AES128-GCM-SHA256", "AES256-SHA", "ECDHE-RSA-AES128-SHA"}) {
      TlsClient client(files_.path("rsa.pem"));
      client.only(TLS1_2_VERSION, refused);
      EXPECT_FALSE(client.connect(port)) << refused;
    }
    TlsClient good(files_.path("rsa.pem"));
    good.only(TLS1_2_VERSION, "ECDHE-RSA-AES256-GCM-SHA384");
    EXPECT_TRUE(good.connect(port));
  }
}

// With a goodbye and without, with a byte sent ahead and without, and a goodbye on a connection that stays.
TEST_F(TlsServed, WhoLeavesIsNoticed) {
  for (const char* stream : {"true", "false"})
    for (bool ahead : {false, true})
      for (const char* way : {"goodbye and close", "close", "goodbye alone"}) {
        TlsClient client(files_.path("server.pem"));
        ASSERT_TRUE(client.connect(server_->http_port()));
        client.send(
            RawClient::post("/v1/completions", cat(R"({"prompt":"ab","cache_salt":"hang","stream":)", stream, "}")));
        ASSERT_TRUE(engine_.wait_open(1));
        if (ahead) client.send("G");
        const auto began = std::chrono::steady_clock::now();
        if (std::string_view(way) != "close") client.say_goodbye();
        if (std::string_view(way) != "goodbye alone") client.close();
        EXPECT_TRUE(engine_.wait_open(0)) << stream << ' ' << ahead << ' ' << way;
        EXPECT_LT(std::chrono::steady_clock::now() - began, 20s) << stream << ' ' << ahead << ' ' << way;
      }
}

}  // namespace
}  // namespace kvasir::server
