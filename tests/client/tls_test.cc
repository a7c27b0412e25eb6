// Private connections over both transports: who is trusted, who is refused, and what is said about it.
#include "client/tls.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read_until.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/asio/write.hpp>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "client/load.h"
#include "core/cat.h"
#include "kvasir.grpc.pb.h"

namespace kvasir::client {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using ::testing::HasSubstr;

std::atomic<bool> never{false};

class Tls : public ::testing::Test {
 protected:
  Tls() {
    std::string name = ::testing::TempDir() + "/kvasir-client-tls-XXXXXX";
    folder_ = mkdtemp(name.data());
    for (const char* who : {"server", "client", "stranger"}) make(who);
  }
  ~Tls() override { std::filesystem::remove_all(folder_); }

  void make(const std::string& who) const {
    const std::string command = cat(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=", who,
        " -addext subjectAltName=IP:127.0.0.1 -keyout ", path(who, "key"), " -out ", path(who, "pem"), " 2>/dev/null");
    EXPECT_EQ(std::system(command.c_str()), 0);
  }
  std::string path(const std::string& who, const std::string& kind) const { return folder_ + "/" + who + "." + kind; }
  std::string read(const std::string& who, const std::string& kind) const {
    std::stringstream text;
    text << std::ifstream(path(who, kind)).rdbuf();
    return text.str();
  }
  TlsFiles known_client() const { return {false, path("server", "pem"), path("client", "pem"), path("client", "key")}; }
  std::string folder_;
};

// The first status of two requests over this target.
Status outcome(const TargetOptions& options) {
  auto target = make_target(options);
  if (!target.ok()) return target.status();
  Workload w;
  w.prompts = {{"x", 2}};
  LoadOptions o;
  o.requests = 2;
  o.concurrency = 1;
  const client::LoadRun run = run_load(**target, w, o, never, {});
  for (const Record& r : run.records) {
    if (!r.status.ok()) return r.status;
    EXPECT_EQ(r.output_tokens, 2);
  }
  return {};
}

class OverGrpc : public Tls, public v1::Inference::Service {
 protected:
  OverGrpc() {
    grpc::SslServerCredentialsOptions tls(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
    tls.pem_root_certs = read("client", "pem");
    tls.pem_key_cert_pairs = {{read("server", "key"), read("server", "pem")}};
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::SslServerCredentials(tls), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~OverGrpc() override { server_->Shutdown(); }

  grpc::Status Generate(grpc::ServerContext* context, const v1::GenerateRequest* r,
                        grpc::ServerWriter<v1::GenerateResponse>* out) override {
    const auto& seen = context->client_metadata();
    const auto key = seen.find("authorization");
    if (key == seen.end() || key->second != "Bearer sesame") return {grpc::StatusCode::UNAUTHENTICATED, "no key"};
    v1::GenerateResponse m;
    m.mutable_delta()->add_tokens();
    for (uint32_t i = 0; i < r->max_tokens(); ++i) out->Write(m);
    m.mutable_finished();
    out->Write(m);
    return grpc::Status::OK;
  }
  TargetOptions options(const TlsFiles& tls) const {
    TargetOptions o;
    o.address = cat("127.0.0.1:", port_);
    o.api_key = "sesame";
    o.tls = tls;
    o.timeout = std::chrono::seconds(20);
    return o;
  }
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

TEST_F(OverGrpc, OurCertificateAndKeyAreShown) {
  EXPECT_TRUE(outcome(options(known_client())).ok());
  TargetOptions without_key = options(known_client());
  without_key.api_key.clear();
  EXPECT_EQ(outcome(without_key).code(), Code::unauthenticated);
}

TEST_F(OverGrpc, WhoeverIsNotTrustedIsNotTalkedTo) {
  EXPECT_EQ(outcome(options({})).code(), Code::unavailable);
  EXPECT_EQ(outcome(options({false, path("stranger", "pem"), path("client", "pem"), path("client", "key")})).code(),
            Code::unavailable);
  EXPECT_EQ(outcome(options({false, path("server", "pem"), path("stranger", "pem"), path("stranger", "key")})).code(),
            Code::unavailable);
}

// Answers each connection's requests until it closes.
class OverHttps : public Tls {
 protected:
  OverHttps()
      : tls_(asio::ssl::context::tls_server), listener_(io_, tcp::endpoint(asio::ip::address_v4::loopback(), 0)) {
    tls_.use_certificate_chain_file(path("server", "pem"));
    tls_.use_private_key_file(path("server", "key"), asio::ssl::context::pem);
    tls_.load_verify_file(path("client", "pem"));
    tls_.set_verify_mode(asio::ssl::verify_peer | asio::ssl::verify_fail_if_no_peer_cert);
    thread_ = std::thread([this] {
      for (;;) {
        boost::system::error_code error;
        tcp::socket socket(io_);
        listener_.accept(socket, error);
        if (error || over_) return;
        serve(std::move(socket));
      }
    });
  }
  ~OverHttps() override {
    over_ = true;
    boost::system::error_code ignored;
    tcp::socket(io_).connect(listener_.local_endpoint(), ignored);  // wakes accept()
    thread_.join();
  }
  void serve(tcp::socket socket) {
    boost::system::error_code error;
    asio::ssl::stream<tcp::socket> stream(std::move(socket), tls_);
    stream.handshake(asio::ssl::stream_base::server, error);
    for (std::string in; !error; in.clear()) {
      asio::read_until(stream, asio::dynamic_buffer(in), "\"temperature\":0.0}", error);  // ends our bodies
      if (error) return;
      const std::string event = "data: {\"choices\":[{\"text\":\"a\"}]}\n\n", body = event + event + "data: [DONE]\n\n";
      asio::write(stream, asio::buffer(cat("HTTP/1.1 200 OK\r\nContent-Length: ", body.size(), "\r\n\r\n", body)),
                  error);
    }
  }
  TargetOptions options(const TlsFiles& tls) const {
    TargetOptions o;
    o.protocol = "openai";
    o.address = cat("https://127.0.0.1:", listener_.local_endpoint().port());
    o.tls = tls;
    o.timeout = std::chrono::seconds(20);
    return o;
  }

  asio::io_context io_;
  asio::ssl::context tls_;
  tcp::acceptor listener_;
  std::atomic<bool> over_{false};
  std::thread thread_;
};

TEST_F(OverHttps, OurCertificateIsShownAndTheConnectionKept) {
  EXPECT_TRUE(outcome(options(known_client())).ok()) << outcome(options(known_client())).to_string();
}

TEST_F(OverHttps, WhoeverIsNotTrustedIsNotTalkedTo) {
  const Status stranger =
      outcome(options({false, path("stranger", "pem"), path("client", "pem"), path("client", "key")}));
  EXPECT_EQ(stranger.code(), Code::unavailable);
  EXPECT_THAT(stranger.message(), HasSubstr("self-signed"));
  EXPECT_EQ(outcome(options({false, path("server", "pem"), "", ""})).code(), Code::unavailable);
}

TEST_F(Tls, BadFilesAreNamedBeforeAnythingIsSent) {
  const auto said = [&](const TlsFiles& tls) {
    TargetOptions o;
    o.address = "127.0.0.1:1";
    o.tls = tls;
    std::string grpc = make_target(o).status().message();
    o.protocol = "openai";
    EXPECT_EQ(make_target(o).status().message(), grpc);
    return grpc;
  };
  EXPECT_THAT(said({false, "/no/such.pem", "", ""}), HasSubstr("tls_ca is /no/such.pem"));
  EXPECT_THAT(said({false, "", path("client", "pem"), ""}), HasSubstr("without tls_key"));
  EXPECT_THAT(said({false, "", "", path("client", "key")}), HasSubstr("without tls_cert"));
  std::ofstream(folder_ + "/empty.pem") << "nothing";
  EXPECT_THAT(said({false, folder_ + "/empty.pem", "", ""}), HasSubstr("no PEM file"));
}

}  // namespace
}  // namespace kvasir::client
