// `kvasir bench` as a process of its own: a server that is killed under it leaves a partial report that counts right.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/e2e/server_process.h"
#include "tests/e2e/streams.h"
#include "tests/scratch.h"

namespace kvasir::e2e {
namespace {

using ::testing::HasSubstr;

constexpr const char* kModel =
    "dummy:llama,layers=1,hidden=64,heads=1,kv_heads=1,head_dim=64,ffn=64,vocab=260,step_ms=2";

class Killed : public ::testing::TestWithParam<const char*> {};

TEST_P(Killed, TheReportIsPartialAndItsErrorsAreCounted) {
  const std::string protocol = GetParam();
  const ScratchFolder scratch;
  const std::string& folder = scratch.path();
  ServerProcess server({"--model", kModel, "--kv-memory", "16MiB", "--threads", "1"});
  ASSERT_TRUE(server.ready()) << server.log();
  const bool http = protocol.starts_with("openai");
  const std::string address = http ? "127.0.0.1:" + std::to_string(server.http_port()) : server.address();
  auto stub = connect(server.address());

  int code = -1;
  std::thread bench([&] {
    const std::string command = std::string(KVASIR_EXE) + " bench " + address + " --protocol " + protocol +
                                " --concurrency 8 --duration 10m --input-len 4 --output-len 20 --verify 5 --json " +
                                folder + "/r.json --html " + folder + "/r.html > " + folder + "/out 2>&1";
    const int status = std::system(command.c_str());
    code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  });
  EXPECT_TRUE(eventually(*stub, [](const auto& stats) { return stats.finished() >= 30; }));
  server.signal(SIGKILL);
  bench.join();
  EXPECT_EQ(code, 1);

  const auto report = nlohmann::json::parse(std::ifstream(folder + "/r.json"), nullptr, false);
  ASSERT_TRUE(report.is_object()) << std::ifstream(folder + "/out").rdbuf();
  const auto& f = report["figures"];
  EXPECT_EQ(f["partial"], true);
  EXPECT_THAT(f["why_partial"].get<std::string>(), HasSubstr("the server is gone"));
  EXPECT_GE(f["succeeded"].get<int>(), 20);  // 30 had finished there; some may have been on their way
  EXPECT_GE(f["failed"].get<int>(), 3);      // as many as it takes to be sure: 50 in a row, or a few for ten seconds
  EXPECT_LE(f["failed"].get<int>(), 100);
  EXPECT_EQ(f["requests"].get<int>(), f["succeeded"].get<int>() + f["failed"].get<int>());
  int counted = 0;
  for (const auto& [cause, count] : f["errors"].items()) {
    EXPECT_TRUE(cause.starts_with("UNAVAILABLE") || cause.starts_with("CANCELLED")) << cause;
    counted += count.get<int>();
  }
  EXPECT_EQ(counted, f["failed"].get<int>());
  EXPECT_FALSE(report.contains("verification"));  // there is nobody to ask again
  std::stringstream page;
  page << std::ifstream(folder + "/r.html").rdbuf();
  EXPECT_THAT(page.str(), HasSubstr("Cut short"));
}

INSTANTIATE_TEST_SUITE_P(Over, Killed, ::testing::Values("kvasir", "ppl", "vllm", "openai", "openai-chat"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// Ctrl-C: what was measured so far is told, and what was under way is counted as such.
TEST(Interrupted, TheReportIsPartialAndSaysSo) {
  const ScratchFolder scratch;
  const std::string& folder = scratch.path();
  ServerProcess server({"--model", kModel, "--kv-memory", "16MiB", "--threads", "1"});
  ASSERT_TRUE(server.ready()) << server.log();
  auto stub = connect(server.address());
  int code = -1;
  std::thread bench([&] {
    const std::string command = "sh -c 'echo $$ > " + folder + "/pid; exec " + KVASIR_EXE + " bench " +
                                server.address() +
                                " --concurrency 4 --duration 10m --input-len 4 --output-len 20 --json " + folder +
                                "/r.json' > " + folder + "/out 2>&1";
    const int status = std::system(command.c_str());
    code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  });
  EXPECT_TRUE(eventually(*stub, [](const auto& stats) { return stats.finished() >= 10; }));
  pid_t pid = 0;
  std::ifstream(folder + "/pid") >> pid;
  ASSERT_GT(pid, 0);
  kill(pid, SIGINT);
  bench.join();
  EXPECT_EQ(code, 1);
  const auto report = nlohmann::json::parse(std::ifstream(folder + "/r.json"), nullptr, false);
  ASSERT_TRUE(report.is_object()) << std::ifstream(folder + "/out").rdbuf();
  const auto& f = report["figures"];
  EXPECT_EQ(f["why_partial"], "interrupted");
  EXPECT_GE(f["succeeded"].get<int>(), 5);
  EXPECT_LE(f["failed"].get<int>(), 4);  // those that were under way
  for (const auto& [cause, count] : f["errors"].items()) EXPECT_THAT(cause, HasSubstr("still under way"));
}

}  // namespace
}  // namespace kvasir::e2e
