// What the gRPC port withstands and how it is secured: message sizes, compression, TLS, mutual TLS, rotation.
#include <gmock/gmock.h>

#include "kvasir.grpc.pb.h"
#include "tests/server/grpc_fixture.h"
#include "tests/server/http_client.h"
#include "tests/server/https_get.h"
#include "tests/server/tls_files.h"

namespace kvasir::server {
namespace {

namespace pb = kvasir::v1;
using testing::HasSubstr;

class SmallMessages : public GrpcFixture {
 protected:
  static ServerOptions small() {
    ServerOptions o;
    o.max_body.bytes = 64 << 10;
    return o;
  }
  SmallMessages() : GrpcFixture(small()) {}
};

TEST_F(SmallMessages, AMessageOverTheLimitKeepsTheTransportsStatus) {
  auto stub = pb::Inference::NewStub(channel_);
  pb::TokenizeRequest in;
  in.set_text(std::string(70 << 10, 'x'));
  grpc::ClientContext call;
  pb::TokenizeResponse out;
  EXPECT_EQ(stub->Tokenize(&call, in, &out).error_code(), grpc::RESOURCE_EXHAUSTED);
}

TEST_F(SmallMessages, GzipIsLimitedByWhatItBecomes) {
  auto stub = pb::Inference::NewStub(channel_);
  auto send = [&](size_t bytes) {
    pb::TokenizeRequest in;
    in.set_text(std::string(bytes, 'x'));
    grpc::ClientContext call;
    call.set_compression_algorithm(GRPC_COMPRESS_GZIP);
    pb::TokenizeResponse out;
    auto status = stub->Tokenize(&call, in, &out);
    EXPECT_TRUE(!status.ok() || size_t(out.ids_size()) == bytes);
    return status.error_code();
  };
  EXPECT_EQ(send(10 << 10), grpc::OK);
  EXPECT_EQ(send(70 << 10), grpc::RESOURCE_EXHAUSTED);
  EXPECT_EQ(send(32 << 20), grpc::RESOURCE_EXHAUSTED);  // 32 KiB on the wire
}

class TlsTest : public GrpcFixture {
 protected:
  TlsTest() {
    files_.make("server");
    options_.tls_cert = files_.path("server.pem");
    options_.tls_key = files_.path("server.key");
  }
  std::string read(const std::string& name) { return files_.read(name); }

  grpc::Status call(const grpc::SslCredentialsOptions& options) {
    auto channel = grpc::CreateChannel(cat("localhost:", server_->grpc_port()), grpc::SslCredentials(options));
    auto stub = pb::Inference::NewStub(channel);
    grpc::ClientContext c;
    c.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    pb::ListModelsResponse out;
    return stub->ListModels(&c, {}, &out);
  }
  TlsFiles files_;
};

TEST_F(TlsTest, ServesTheCertificateAndItsSuccessor) {
  std::string first = read("server.pem");
  auto status = call({first, "", ""});
  EXPECT_TRUE(status.ok()) << status.error_message();
  files_.make("other");
  EXPECT_FALSE(call({read("other.pem"), "", ""}).ok());
  files_.replace("server", "other");
  bool rotated = false;
  for (int i = 0; i < 10 && !rotated; ++i) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
    rotated = call({read("server.pem"), "", ""}).ok();
  }
  EXPECT_TRUE(rotated);
}

TEST_F(TlsTest, BadFilesAreSaidAtTheStart) {
  ServerOptions o = options_;
  o.tls_key = files_.path("none.key");
  auto server = Server::start(o, engine_);
  ASSERT_FALSE(server.ok());
  EXPECT_THAT(server.status().message(), HasSubstr("none.key"));
  engine_.set_state(engine::State::serving);
}

class MutualTlsTest : public TlsTest {
 protected:
  MutualTlsTest() {
    files_.make("client");
    files_.make("stranger");
    options_.tls_client_ca = files_.path("client.pem");
  }
};

TEST_F(MutualTlsTest, OnlyKnownClients) {
  std::string root = read("server.pem");
  EXPECT_TRUE(call({root, read("client.key"), read("client.pem")}).ok());
  EXPECT_FALSE(call({root, "", ""}).ok());
  EXPECT_FALSE(call({root, read("stranger.key"), read("stranger.pem")}).ok());
}

// Who is known is a file too: with another in its place others are let in, and the former no more.
TEST_F(MutualTlsTest, WhoIsKnownIsReadAgain) {
  std::string root = read("server.pem");
  const grpc::SslCredentialsOptions former{root, read("client.key"), read("client.pem")};
  const grpc::SslCredentialsOptions next{root, read("stranger.key"), read("stranger.pem")};
  EXPECT_TRUE(call(former).ok());
  files_.replace("client", "stranger");
  bool rotated = false;
  for (int i = 0; i < 20 && !rotated; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    rotated = call(next).ok() && !call(former).ok();
  }
  EXPECT_TRUE(rotated);
}

// Both ports are secured by the same files.
class TlsBothTest : public TlsTest {
 protected:
  TlsBothTest() { options_.http_port = 0; }
  std::optional<int> get(const std::string& root, const std::string& client = "") {
    return https_get(server_->http_port(), files_.path(root), client.empty() ? "" : files_.path(client + ".pem"),
                     client.empty() ? "" : files_.path(client + ".key"));
  }
};

TEST_F(TlsBothTest, ServesTheCertificateAndItsSuccessor) {
  EXPECT_EQ(get("server.pem"), 200);
  files_.make("other");
  EXPECT_EQ(get("other.pem"), std::nullopt);
  files_.copy("server.pem", "first.pem");
  files_.replace("server", "other");
  bool http = false, rpc = false;
  for (int i = 0; i < 100 && !(http && rpc); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    http = get("server.pem") == 200;
    rpc = call({read("server.pem"), "", ""}).ok();
  }
  EXPECT_TRUE(http);
  EXPECT_TRUE(rpc);
  EXPECT_EQ(get("first.pem"), std::nullopt);
}

TEST_F(TlsBothTest, FilesThatCannotBeReadChangeNothing) {
  files_.copy("server.pem", "first.pem");
  files_.write("server.pem", "not a certificate");
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // longer than the files go unlooked at
  EXPECT_EQ(get("first.pem"), 200);
  EXPECT_EQ(get("first.pem"), 200);
  RawClient plain(server_->http_port());
  plain.send(RawClient::get("/health"));
  EXPECT_EQ(plain.read().status, 0);  // plain HTTP gets nothing from a TLS port
}

class SlowTls : public TlsBothTest {
 protected:
  SlowTls() { options_.header_timeout = Millis(2000); }  // the honest client's handshake comes by then on any machine
};

TEST_F(SlowTls, AHandshakeThatDoesNotComeIsNotWaitedFor) {
  RawClient http(server_->http_port()), rpc(server_->grpc_port());
  EXPECT_TRUE(http.closed_within(std::chrono::seconds(10)));
  EXPECT_TRUE(rpc.closed_within(std::chrono::seconds(10)));
  EXPECT_EQ(get("server.pem"), 200);
}

class MutualBothTest : public TlsBothTest {
 protected:
  MutualBothTest() {
    files_.make("client");
    files_.make("stranger");
    options_.tls_client_ca = files_.path("client.pem");
  }
};

TEST_F(MutualBothTest, OnlyKnownClientsOverHttp) {
  EXPECT_EQ(get("server.pem", "client"), 200);
  EXPECT_EQ(get("server.pem"), std::nullopt);
  EXPECT_EQ(get("server.pem", "stranger"), std::nullopt);
  files_.copy("client.pem", "former.pem");
  files_.copy("client.key", "former.key");
  files_.replace("client", "stranger");
  bool rotated = false;
  for (int i = 0; i < 100 && !rotated; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    rotated = get("server.pem", "client") == 200 && get("server.pem", "former") == std::nullopt;
  }
  EXPECT_TRUE(rotated);
}

}  // namespace
}  // namespace kvasir::server
