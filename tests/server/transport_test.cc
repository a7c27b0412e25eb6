// What the gRPC port withstands and how it is secured: message sizes, compression, TLS, mutual TLS, rotation.
#include <gmock/gmock.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "kvasir.grpc.pb.h"
#include "tests/server/grpc_fixture.h"

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
    char name[] = "/tmp/kvasir-tls-XXXXXX";
    folder_ = mkdtemp(name);
    make("server");
    options_.tls_cert = folder_ + "/server.pem";
    options_.tls_key = folder_ + "/server.key";
  }
  ~TlsTest() override { std::filesystem::remove_all(folder_); }

  void make(const std::string& who) {
    std::string command =
        cat("openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=", who,
            " -addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout ", folder_, "/", who, ".key -out ", folder_,
            "/", who, ".pem 2>/dev/null");
    ASSERT_EQ(std::system(command.c_str()), 0);
  }
  std::string read(const std::string& name) {
    std::stringstream text;
    text << std::ifstream(folder_ + "/" + name).rdbuf();
    return text.str();
  }
  grpc::Status call(const grpc::SslCredentialsOptions& options) {
    auto channel = grpc::CreateChannel(cat("localhost:", server_->grpc_port()), grpc::SslCredentials(options));
    auto stub = pb::Inference::NewStub(channel);
    grpc::ClientContext c;
    c.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(3));
    pb::ListModelsResponse out;
    return stub->ListModels(&c, {}, &out);
  }
  std::string folder_;
};

TEST_F(TlsTest, ServesTheCertificateAndItsSuccessor) {
  std::string first = read("server.pem");
  auto status = call({first, "", ""});
  EXPECT_TRUE(status.ok()) << status.error_message();
  make("other");
  EXPECT_FALSE(call({read("other.pem"), "", ""}).ok());
  std::filesystem::rename(folder_ + "/other.key", folder_ + "/server.key");
  std::filesystem::rename(folder_ + "/other.pem", folder_ + "/server.pem");
  bool rotated = false;
  for (int i = 0; i < 10 && !rotated; ++i) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
    rotated = call({read("server.pem"), "", ""}).ok();
  }
  EXPECT_TRUE(rotated);
}

TEST_F(TlsTest, BadFilesAreSaidAtTheStart) {
  ServerOptions o = options_;
  o.tls_key = folder_ + "/none.key";
  auto server = Server::start(o, engine_);
  ASSERT_FALSE(server.ok());
  EXPECT_THAT(server.status().message(), HasSubstr("none.key"));
  engine_.set_state(engine::State::serving);
}

class MutualTlsTest : public TlsTest {
 protected:
  MutualTlsTest() {
    make("client");
    make("stranger");
    options_.tls_client_ca = folder_ + "/client.pem";
  }
};

TEST_F(MutualTlsTest, OnlyKnownClients) {
  std::string root = read("server.pem");
  EXPECT_TRUE(call({root, read("client.key"), read("client.pem")}).ok());
  EXPECT_FALSE(call({root, "", ""}).ok());
  EXPECT_FALSE(call({root, read("stranger.key"), read("stranger.pem")}).ok());
}

}  // namespace
}  // namespace kvasir::server
