// More connections than the limit on open files has room for: both ports go on, and the log says how many fit. The
// limits are this whole process's, so the tests are in their order.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <sys/resource.h>

#include "health.grpc.pb.h"
#include "server/descriptors.h"
#include "server/server.h"
#include "tests/hostile/hostile.h"
#include "tests/server/fake_engine.h"

namespace kvasir::server {
namespace {

using namespace std::chrono_literals;

rlim_t soft() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  return limit.rlim_cur;
}
void set_limits(rlim_t soft, rlim_t hard) {
  rlimit limit{soft, hard};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
}

bool rpc_health(int port) {
  grpc::ChannelArguments own;
  own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  auto stub = grpc::health::v1::Health::NewStub(
      grpc::CreateCustomChannel(cat("127.0.0.1:", port), grpc::InsecureChannelCredentials(), own));
  grpc::ClientContext call;
  call.set_deadline(std::chrono::system_clock::now() + 10s);
  grpc::health::v1::HealthCheckResponse out;
  return stub->Check(&call, {}, &out).ok();
}
int http_health(int port) {
  RawClient client(port);
  if (!client.connected()) return 0;
  client.send(RawClient::get("/health"));
  return client.read().status;
}

TEST(Descriptors, TheSoftLimitIsRaisedAsFarAsIsNeeded) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  set_limits(1024, limit.rlim_max);
  auto fits = fit_connections(1000, 2);
  ASSERT_TRUE(fits.ok());
  EXPECT_EQ(*fits, 1000);
  EXPECT_GT(soft(), 2000u);
}

TEST(Descriptors, WhereItCannotBeRaisedFewerConnectionsAreTaken) {
  set_limits(400, 1200);  // the clients of these tests are in this process, too: see below
  auto fits = fit_connections(4096, 2);
  ASSERT_TRUE(fits.ok());
  EXPECT_EQ(soft(), 1200u);
  EXPECT_LT(*fits, 550);
  EXPECT_GT(*fits, 300);
  auto few = fit_connections(4096, 30);
  ASSERT_FALSE(few.ok());
  EXPECT_NE(few.status().message().find("ulimit -n"), std::string::npos);
}

// Idle connections to the brim: a probe is answered all the same on both ports.
TEST(Descriptors, IdleConnectionsDoNotStopThePorts) {
  FakeEngine engine;
  ServerOptions options;
  options.grpc_port = options.http_port = 0;
  options.access_log = false;
  options.header_timeout = Millis(60'000);
  options.max_connections = 100;
  auto server = Server::start(options, engine);
  ASSERT_TRUE(server.ok()) << server.status().message();
  for (int port : {(*server)->http_port(), (*server)->grpc_port()}) {
    std::vector<std::unique_ptr<RawClient>> idle;
    for (int i = 0; i < 200; ++i) idle.push_back(std::make_unique<RawClient>(port));
    bool http = false, rpc = false;
    for (int i = 0; i < 200 && !(http && rpc); ++i) {  // those over the limit are let go within a moment
      http = http_health((*server)->http_port()) == 200;
      rpc = rpc_health((*server)->grpc_port());
      if (!(http && rpc)) std::this_thread::sleep_for(50ms);
    }
    EXPECT_TRUE(http);
    EXPECT_TRUE(rpc);
  }
}

}  // namespace
}  // namespace kvasir::server
