// What kvasir inspect says that serving takes, beside what a server of the same model takes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>

#include "core/cat.h"
#include "tests/e2e/server_process.h"
#include "tests/server/http_client.h"

namespace kvasir::e2e {
namespace {

using ::testing::HasSubstr;

std::string inspect(const std::string& arguments) {
  FILE* from = ::popen(cat(KVASIR_EXE, " inspect ", arguments, " 2>&1").c_str(), "r");
  if (!from) return "popen failed";
  std::string out;
  char part[4096];
  for (size_t n; (n = std::fread(part, 1, sizeof part, from)) > 0;) out.append(part, n);
  ::pclose(from);
  return out;
}

double resident(pid_t pid) {
  std::ifstream file(cat("/proc/", pid, "/status"));
  for (std::string word; file >> word;)
    if (word == "VmRSS:") {
      double kilobytes = 0;
      file >> kilobytes;
      return 1024 * kilobytes;
    }
  return 0;
}

// A prompt of all of the context makes the largest steps and touches all of the cache there is.
TEST(Inspect, SaysWhatServeTakes) {
  for (const char* type : {"bf16", "Q8_0"}) {
    const std::string model =
        cat("dummy:llama,layers=6,hidden=1024,ffn=3072,heads=16,kv_heads=8,vocab=8192,type=", type);
    const auto said = nlohmann::json::parse(inspect("--json --batch 1 --context 1024 " + model));
    ServerProcess server({"--model", model, "--kv-memory", "64MiB", "--threads", "2", "--device", "cpu"});
    ASSERT_TRUE(server.ready()) << server.log();
    server::RawClient client(server.http_port());
    client.send(server::RawClient::post(
        "/v1/completions", nlohmann::json({{"prompt", std::string(1000, 'a')}, {"max_tokens", 8}}).dump()));
    ASSERT_EQ(client.read().status, 200);
    const double all = said["memory"]["all"], taken = resident(server.pid());
    std::printf("%s: said %.1f MB, taken %.1f MB\n", type, all / 1e6, taken / 1e6);
    EXPECT_GT(all, 0.9 * taken) << type;
    EXPECT_LT(all, 1.15 * taken) << type;
    EXPECT_EQ(said["memory"]["lacking"], 0);
  }
}

// MiB that a server had of an H100 beside its cache, by nvidia-smi.
TEST(Inspect, SaysWhatAGpuHasToHold) {
  const std::string shape =
      "dummy:llama,layers=32,hidden=4096,heads=32,kv_heads=8,head_dim=128,ffn=14336,vocab=128256,";
  const struct {
    std::string arguments;
    double measured;
  } cases[] = {{"dummy:llama", 761},
               {shape + "context=16384,type=bf16", 17509},
               {shape + "context=16384,type=q4_0", 7763},
               {shape + "context=16384,type=bf16 --quantize fp8", 11107},
               {shape + "context=131072,type=bf16", 18195},
               {"dummy:qwen3-30b-a3b,type=bf16", 60609}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.arguments);
    const auto memory = nlohmann::json::parse(inspect("--device cuda --json " + c.arguments))["memory"];
    const double said = (memory["all"].get<double>() - memory["cache"].get<double>()) / (1 << 20);
    std::printf("%s: said %.0f MiB, measured %.0f\n", c.arguments.c_str(), said, c.measured);
    EXPECT_GT(said, 0.95 * c.measured);
    EXPECT_LT(said, 1.05 * c.measured);
  }
  EXPECT_THAT(inspect("--device cuda --ranks 2 dummy:qwen3-30b-a3b,type=bf16"),
              HasSubstr("on each of 2 GPUs, at most"));
  EXPECT_THAT(inspect("--device gpu dummy:llama"), HasSubstr("device is gpu; it must be cpu or cuda"));
  EXPECT_THAT(inspect("--quantize fp8 dummy:llama"), HasSubstr("add --device cuda"));
  EXPECT_THAT(inspect("--device cuda --quantize int4 dummy:llama"), HasSubstr("it must be auto, bf16 or fp8"));
}

// The cache that it names for so many sequences holds as many, with the states that some models have beside pages.
TEST(Inspect, ItsCacheHoldsTheSequencesItIsFor) {
  for (auto [model, batch, context] : {std::tuple{"dummy:qwen3-next-80b-a3b", 1, 1024},
                                       {"dummy:qwen3.5-4b", 16, 2048},
                                       {"dummy:qwen3-0.6b", 7, 500}}) {
    const auto said =
        nlohmann::json::parse(inspect(cat("--device cuda --json --batch ", batch, " --context ", context, " ", model)));
    EXPECT_GE(said["pools"][0]["pages"].get<int64_t>() * 16, int64_t(batch) * context / 16 * 16) << model;
    if (said.contains("states")) EXPECT_GE(said["states"].get<int>(), batch) << model;
  }
}

TEST(Inspect, KeepsToWhatCanBeServed) {
  EXPECT_THAT(inspect("--device cuda --page-size 12 dummy:llama"), HasSubstr("a power of two up to 256"));
  const std::string said = inspect("--batch 1 --context 999999 dummy:qwen3-0.6b");
  EXPECT_THAT(said, HasSubstr("the context is cut to what the model was made for"));
  EXPECT_THAT(said, HasSubstr("1 sequences of 40960 tokens"));
}

TEST(Inspect, SaysWhatIsLacking) {
  const std::string said = inspect("--batch 4096 --context 131072 dummy:llama-3.1-8b");
  EXPECT_THAT(said, HasSubstr("lacks "));
  EXPECT_THAT(said, HasSubstr("--kv-dtype"));
}

}  // namespace
}  // namespace kvasir::e2e
