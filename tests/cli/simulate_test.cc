// `kvasir simulate` on what `kvasir generate --record` wrote: the same plans; and as a workload under every policy.
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/cli/shell.h"
#include "tests/scratch.h"

namespace kvasir::cli {
namespace {

using ::testing::HasSubstr;

bool built(const std::string& command) { return shell("--help").out.find("\n  " + command + " ") != std::string::npos; }

std::string read(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

size_t count(const std::string& text, const std::string& what) {
  size_t n = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++n;
  return n;
}

class Simulate : public ::testing::Test {
 protected:
  std::string file(const std::string& name) const { return folder_.path(name); }
  std::string write(const std::string& name, const std::string& text) const { return folder_.file(name, text); }

 private:
  const ScratchFolder folder_;
};

// Forty prompts that share beginnings, in a cache too small for those that run: pages move to the host and back.
// Answers are far longer than what is kept free for those that run, so that they meet the end of the cache however the
// prompts arrive.
TEST_F(Simulate, ARecordedRunIsReplayedToTheSamePlansAndSimulatedUnderEveryPolicy) {
  if (!built("generate")) GTEST_SKIP() << "this build has no model";
  std::string prompts;
  for (int i = 0; i < 40; ++i) {
    const std::string text = std::string(static_cast<size_t>(10 + i % 5 * 10), static_cast<char>('a' + i % 3));
    prompts +=
        "{\"prompt\":\"" + text + std::to_string(i) + "\",\"max_tokens\":" + std::to_string(200 + i % 7 * 20) + "}\n";
  }
  const std::string recording = file("run.rec");
  const Ran ran = shell(
      "generate --model dummy:llama,layers=1,hidden=64,heads=1,kv_heads=1,ffn=64,vocab=260 --kv-memory 128KiB "
      "--host-kv-memory 1MiB --max-running 8 --page-size 8 --ignore-eos --json --file " +
      write("prompts.jsonl", prompts) + " --record " + recording);
  ASSERT_EQ(ran.code, 0) << ran.out;

  const Ran again = shell("simulate --workload " + recording + " --out " + file("again.json"));
  EXPECT_EQ(again.code, 0) << again.out;
  const auto report = nlohmann::json::parse(read(file("again.json")), nullptr, false);
  ASSERT_TRUE(report.is_object()) << again.out;
  EXPECT_EQ(report["identical"], true);
  EXPECT_EQ(report["cut_short"], false);
  EXPECT_EQ(report["requests"], 40);
  EXPECT_EQ(report["output_tokens"], 10300);
  EXPECT_GT(report["preemptions"], 0) << "the cache was meant to be too small";
  EXPECT_GT(report["cached_tokens"], 0);

  const Ran fit = shell("simulate --workload " + recording + " --fit " + file("cost.json"));
  EXPECT_EQ(fit.code, 0) << fit.out;
  const auto cost = nlohmann::json::parse(read(file("cost.json")), nullptr, false);
  EXPECT_THAT(cost["source"].get<std::string>(), HasSubstr("fitted by kvasir simulate --fit"));

  const Ran both = shell("simulate --workload " + recording + " --policy all --fit " + file("other.json"));
  EXPECT_EQ(both.code, 2);
  EXPECT_THAT(both.out, HasSubstr("leave out --policy and --config"));

  const Ran all = shell("simulate --workload " + recording + " --config " + file("cost.json") + " --policy all --out " +
                        file("all.json"));
  EXPECT_EQ(all.code, 0) << all.out;
  const auto policies = nlohmann::json::parse(read(file("all.json")), nullptr, false);
  ASSERT_EQ(policies.size(), 5u);
  for (const auto& p : policies) {
    EXPECT_EQ(p["finished"], 40) << p["policy"];
    EXPECT_EQ(p["output_tokens"], report["output_tokens"]) << p["policy"];
  }
  const std::string plot = read(file("all.json.svg"));
  EXPECT_TRUE(plot.starts_with("<svg ")) << plot.substr(0, 80);
  for (const char* policy : {"fcfs", "lpm", "priority", "deadline", "fair"})
    EXPECT_EQ(count(plot, std::string(">") + policy + "</text>"), 7u) << policy;  // a bar in each of the figures
}

TEST_F(Simulate, AChangedRecordingDoesNotPassForTheRun) {
  if (!built("generate")) GTEST_SKIP() << "this build has no model";
  const std::string recording = file("run.rec");
  const Ran ran = shell(
      "generate --model dummy:llama,layers=1,hidden=64,heads=1,kv_heads=1,ffn=64,vocab=260 "
      "--kv-memory 1MiB --max-tokens 5 --ignore-eos --record " +
      recording + " 'a prompt'");
  ASSERT_EQ(ran.code, 0) << ran.out;
  std::string text = read(recording);
  const size_t plan = text.find("\"plan\":\"");
  ASSERT_NE(plan, std::string::npos);
  text[plan + 8] = text[plan + 8] == '0' ? '1' : '0';
  const Ran differs = shell("simulate --workload " + write("changed.rec", text));
  EXPECT_EQ(differs.code, 1);
  EXPECT_THAT(differs.out, HasSubstr("does not replay as it was recorded: line"));
}

TEST_F(Simulate, SaysWhatIsWrong) {
  EXPECT_THAT(shell("simulate").out, HasSubstr("no --workload FILE was given"));
  const auto wrong = [&](const std::string& lines, const std::string& more = "") {
    const Ran r = shell("simulate --workload " + write("w.jsonl", lines) + more);
    EXPECT_EQ(r.code, 2) << r.out;
    return r.out;
  };
  const std::string line = "{\"arrival_s\":3,\"prompt_tokens\":5,\"output_tokens\":2}\n";
  EXPECT_THAT(wrong(line + "{\"arrival_s\":1,\"prompt_tokens\":5}\n"), HasSubstr("line 2: arrival_s is 1"));
  EXPECT_THAT(wrong("{\"prompt_tokens\":1e12}\n"), HasSubstr("line 1: prompt_tokens is"));
  EXPECT_THAT(wrong(""), HasSubstr("no requests"));
  EXPECT_THAT(wrong(line, " --fit x.json"), HasSubstr("--fit needs a recording"));
  EXPECT_THAT(wrong(line, " --config " + write("c.json", "{\"page_size\":0}")), HasSubstr("65536"));
  EXPECT_THAT(wrong(line, " --config " + write("c.json", "{\"cost\":{\"token_us\":1e300}}")), HasSubstr("token_us"));
  EXPECT_THAT(wrong(line, " --policy best"), HasSubstr("fcfs"));
  EXPECT_EQ(shell("simulate --workload /no/such/file").code, 2);
  const Ran good = shell("simulate --policy fcfs --workload " + write("w.jsonl", line));
  EXPECT_EQ(good.code, 0);
  EXPECT_EQ(nlohmann::json::parse(good.out)[0]["finished"], 1);
}

// Its steps take what --machine says, whatever the scheduler expects of them.
TEST_F(Simulate, TheMachineMayDifferFromWhatIsExpected) {
  const Ran r =
      shell("simulate --policy fcfs --machine " + write("m.json", "{\"cost\":{\"fixed_us\":100000}}") + " --workload " +
            write("w.jsonl", "{\"arrival_s\":0,\"prompt_tokens\":10,\"output_tokens\":5}\n"));
  ASSERT_EQ(r.code, 0) << r.out;
  EXPECT_NEAR(nlohmann::json::parse(r.out)[0]["simulated_s"].get<double>(), 0.5014, 0.0001);  // five steps
}

// One request by hand: a prompt, its cache over the link, and two decodes on the other side.
TEST_F(Simulate, APromptComputedElsewhereWaitsForTheLink) {
  const std::string cost =
      write("c.json",
            "{\"cost\":{\"fixed_us\":1000,\"token_us\":10,\"context_us\":0,\"decode_token_us\":100,"
            "\"decode_context_us\":0}}");
  const Ran r = shell(
      "simulate --policy fcfs --prefill-pool 1 --decode-pool 1 --link-gbps 1 --kv-bytes-per-token 125000 "
      "--config " +
      cost + " --workload " + write("w.jsonl", "{\"arrival_s\":0,\"prompt_tokens\":1000,\"output_tokens\":3}\n"));
  ASSERT_EQ(r.code, 0) << r.out;
  const auto report = nlohmann::json::parse(r.out)[0];
  const auto &together = report["together"], &apart = report["apart"];
  EXPECT_NEAR(together["ttft_s"]["p50"].get<double>(), 0.011, 1e-6);
  EXPECT_NEAR(apart["ttft_s"]["p50"].get<double>(), 0.011, 1e-6);
  EXPECT_NEAR(report["link"]["moved_s"]["p50"].get<double>(), 1, 1e-6);
  EXPECT_NEAR(report["link"]["bytes"].get<double>(), 1.25e8, 1);
  EXPECT_NEAR(together["latency_s"]["p50"].get<double>(), 0.0132, 1e-6);
  EXPECT_NEAR(apart["latency_s"]["p50"].get<double>(), 1.0132, 1e-6);
  EXPECT_NEAR(apart["itl_s"]["mean"].get<double>(), (1.0011 + 0.0011) / 2, 1e-6);
  for (const auto& fleet : {together, apart}) {
    EXPECT_EQ(fleet["finished"], 1);
    EXPECT_EQ(fleet["output_tokens"], 3);
    EXPECT_EQ(fleet["machines"], 2);
  }
}

// Long prompts beside answers: apart, no gap between tokens has a prompt in it.
TEST_F(Simulate, DecodesApartFromPromptsHaveEvenGaps) {
  std::string lines;
  for (int i = 0; i < 60; ++i)
    lines += "{\"arrival_s\":" + std::to_string(i * 0.1) + ",\"prompt_tokens\":4000,\"output_tokens\":50}\n";
  const std::string pools =
      "simulate --policy fcfs --prefill-pool 2 --decode-pool 1 --kv-bytes-per-token 131072 --config "
      "configs/cost/h200-8b-bf16.json --workload " +
      write("w.jsonl", lines) + " --link-gbps ";
  const Ran fast = shell(pools + "3000");
  ASSERT_EQ(fast.code, 0) << fast.out;
  const auto report = nlohmann::json::parse(fast.out)[0];
  EXPECT_EQ(report["apart"]["finished"], 60);
  EXPECT_EQ(report["apart"]["output_tokens"], 60 * 50);
  EXPECT_EQ(report["together"]["output_tokens"], 60 * 50);
  EXPECT_LT(report["apart"]["itl_s"]["p99"].get<double>(), report["together"]["itl_s"]["p99"].get<double>() / 2);
  const Ran slow = shell(pools + "1");  // 4.2 s a prompt, so answers queue behind the link
  ASSERT_EQ(slow.code, 0) << slow.out;
  EXPECT_GT(nlohmann::json::parse(slow.out)[0]["apart"]["latency_s"]["p50"].get<double>(), 10);
  EXPECT_NEAR(nlohmann::json::parse(slow.out)[0]["link"]["use"].get<double>(), 1, 0.05);
}

TEST_F(Simulate, TwoPoolsAreSaidWhole) {
  const std::string line = "{\"arrival_s\":0,\"prompt_tokens\":5,\"output_tokens\":2}\n";
  const auto wrong = [&](const std::string& lines, const std::string& flags) {
    const Ran r = shell("simulate --workload " + write("w.jsonl", lines) + flags);
    EXPECT_EQ(r.code, 2) << r.out;
    return r.out;
  };
  const std::string all = " --prefill-pool 1 --decode-pool 1 --link-gbps 1 --kv-bytes-per-token 8";
  EXPECT_THAT(wrong(line, " --prefill-pool 1"), HasSubstr("two pools are said by four flags"));
  EXPECT_THAT(wrong(line, " --link-gbps 10"), HasSubstr("two pools are said by four flags"));
  EXPECT_THAT(wrong(line, all + " --decode-pool -1"), HasSubstr("decode"));
  EXPECT_THAT(wrong(line + "{\"follows\":0,\"arrival_s\":1,\"prompt_tokens\":5,\"output_tokens\":2}\n", all),
              HasSubstr("request 1 has follows"));
}

TEST_F(Simulate, TheCostModelsThatComeWithItAreTaken) {
  int models = 0;
  for (const auto& entry : std::filesystem::directory_iterator("configs/cost")) {
    const auto j = nlohmann::json::parse(read(entry.path()), nullptr, false);
    ASSERT_TRUE(j.is_object()) << entry.path();
    EXPECT_TRUE(j.contains("source") || j.contains("about")) << entry.path() << " says how it came about";
    for (const char* part :
         {"fixed_us", "token_us", "context_us", "decode_token_us", "decode_context_us", "page_move_us"})
      EXPECT_GT(j["cost"][part].get<double>(), 0) << entry.path() << " " << part;
    const Ran r = shell("simulate --policy fcfs --config " + entry.path().string() + " --workload " +
                        write("w.jsonl", "{\"arrival_s\":0,\"prompt_tokens\":500,\"output_tokens\":20}\n"));
    ASSERT_EQ(r.code, 0) << r.out;
    const auto& cost = j["cost"];
    // One prompt and nineteen decodes, as the file has them.
    double us = 20 * cost["fixed_us"].get<double>() + 500 * cost["token_us"].get<double>() +
                500 * 250 * cost["context_us"].get<double>() + 19 * cost["decode_token_us"].get<double>();
    for (int t = 500; t < 519; ++t) us += (t + 0.5) * cost["decode_context_us"].get<double>();
    EXPECT_NEAR(nlohmann::json::parse(r.out)[0]["simulated_s"].get<double>(), us * 1e-6, us * 1e-8) << entry.path();
    ++models;
  }
  EXPECT_GE(models, 2);
}

TEST(Inspect, SaysHowThePoolComesAbout) {
  if (!built("inspect")) GTEST_SKIP() << "this build has no model";
  const std::string model = "dummy:llama,layers=2,hidden=64,heads=1,kv_heads=1,head_dim=64,ffn=64,vocab=260";
  const Ran r = shell("inspect " + model + " --kv-memory 1MiB");
  EXPECT_EQ(r.code, 0) << r.out;
  EXPECT_THAT(r.out, HasSubstr("1.0 MiB / (16 tokens x 512 bytes) = 128 pages of all layers"));
  EXPECT_THAT(shell("inspect " + model).out,
              ::testing::ContainsRegex("min\\(.* free / 4, 4 GiB\\) = .* / \\(16 tokens"));
}

}  // namespace
}  // namespace kvasir::cli
