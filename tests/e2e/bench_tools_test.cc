// The commands that bench/README.md sets beside ppl.llm.serving's tools, and the other ways to load a server, against a
// real one: each as it is typed there. And what that server recorded meanwhile runs again to the same plans.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/e2e/server_process.h"
#include "tests/scratch.h"

namespace kvasir::e2e {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

constexpr const char* kModel = "dummy:llama,layers=1,hidden=64,heads=1,kv_heads=1,head_dim=64,ffn=64,vocab=260";

struct Ran {
  int code = -1;
  std::string out;
};
Ran run(const std::string& arguments) {
  Ran r;
  FILE* pipe = popen((std::string(KVASIR_EXE) + " " + arguments + " 2>&1").c_str(), "r");
  char buffer[4096];
  for (size_t n; (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;) r.out.append(buffer, n);
  const int status = pclose(pipe);
  r.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return r;
}

std::string read(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

class Tools : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    scratch = new ScratchFolder;
    folder = scratch->path();
    // A pool too small for all that is asked at once, so that there is something to record.
    server = new ServerProcess({"--model", kModel, "--kv-memory", "256KiB", "--threads", "1", "--max-running", "16",
                                "--record", folder + "/run.rec"});
    ASSERT_TRUE(server->ready()) << server->log();
  }
  static void TearDownTestSuite() {
    delete server;
    delete scratch;
  }
  static std::string file(const std::string& name, const std::string& text) { return scratch->file(name, text); }
  // `kvasir bench` with a JSON report, which must tell of so many good requests and no other.
  static Json bench(const std::string& arguments, int good, const std::string& address = "") {
    const std::string report = folder + "/report.json";
    std::filesystem::remove(report);
    const Ran r =
        run("bench " + (address.empty() ? server->address() : address) + " " + arguments + " --json " + report);
    EXPECT_EQ(r.code, 0) << arguments << "\n" << r.out;
    Json j = Json::parse(read(report), nullptr, false);
    if (!j.is_object()) return Json::object();
    EXPECT_EQ(j["figures"]["succeeded"], good) << arguments;
    EXPECT_EQ(j["figures"]["failed"], 0) << arguments;
    EXPECT_EQ(j["figures"]["partial"], false) << arguments;
    return j;
  }
  static std::string load_of(const Json& report) { return report["settings"]["load"].get<std::string>(); }

  static inline ServerProcess* server = nullptr;
  static inline ScratchFolder* scratch = nullptr;
  static inline std::string folder;
};

const std::string kPrompts =
    "{\"prompt\":\"alpha\",\"max_tokens\":5}\n{\"prompt\":\"beta\",\"max_tokens\":6}\n{\"prompt\":\"gamma\",\"max_"
    "tokens\":7}\n";

TEST_F(Tools, ClientSample) {
  const Ran r = run("bench " + server->address() + " --protocol ppl --prompts " + file("p.jsonl", kPrompts) +
                    " --arrival at-once --batch 3 --answers -");
  EXPECT_EQ(r.code, 0) << r.out;
  EXPECT_THAT(r.out, HasSubstr("3 good, 0 failed"));
  std::istringstream lines(r.out);
  int answers = 0;
  for (std::string line; std::getline(lines, line);) {
    const Json j = Json::parse(line, nullptr, false);
    if (!j.is_object()) continue;
    EXPECT_EQ(j["output_tokens"], 5 + answers) << line;
    EXPECT_FALSE(j["answer"].get<std::string>().empty());
    ++answers;
  }
  EXPECT_EQ(answers, 3);
}

TEST_F(Tools, ClientPressure) {
  const std::string size = " --input-len 4 --output-len 8";
  EXPECT_EQ(load_of(bench("--protocol ppl --concurrency 16 --requests 60" + size, 60)), "closed loop, 16 clients");
  EXPECT_EQ(load_of(bench("--protocol ppl --arrival at-once --batch 64 --requests 64" + size, 64)),
            "open loop, all at once, 64 in a call");
}

TEST_F(Tools, ClientQpsMeasure) {
  std::string share = "[";
  for (int i = 0; i < 30; ++i)
    share += std::string(i ? "," : "") + R"({"conversations":[{"from":"human","value":"question )" + std::to_string(i) +
             R"("},{"from":"gpt","value":"an answer of thirty-two letters."}]})";
  const std::string prompts = " --prompts " + file("sharegpt.json", share + "]");
  const Json poisson = bench("--protocol ppl --rate 200" + prompts + " --requests 30", 30);
  EXPECT_EQ(load_of(poisson), "open loop, poisson at 200 a second");
  EXPECT_EQ(poisson["figures"]["output_tokens"], 30 * 8);
  bench("--protocol ppl --arrival at-once" + prompts + " --requests 30", 30);
  bench("--protocol ppl --rate 200 --no-ignore-eos" + prompts + " --requests 30", 30);
}

TEST_F(Tools, OfflineInferenceAndWhatThePrefixCacheSaves) {
  const std::string offline = std::string("generate --model ") + kModel +
                              " --kv-memory 1MiB --ignore-eos --page-size 4 --file " + file("p.jsonl", kPrompts);
  const Ran once = run(offline);
  EXPECT_EQ(once.code, 0) << once.out;
  EXPECT_THAT(once.out, HasSubstr("18 output tokens"));
  const Ran twice = run(offline + " --rounds 2");
  EXPECT_THAT(twice.out, HasSubstr("  0 of the prompt tokens were cached"));
  EXPECT_THAT(twice.out, HasSubstr("the first token came after"));
}

TEST_F(Tools, EveryArrivalPatternAndConversationsInBothLoops) {
  const std::string size = " --input-len 3-6 --output-len lognormal:4,0.3 --requests 20";
  for (const std::string pattern : {"poisson", "constant", "bursty", "ramp"})
    EXPECT_THAT(load_of(bench("--rate 100 --arrival " + pattern + size, 20)), HasSubstr(pattern));
  const std::string turns = " --turns 3 --turn-len 2 --verify 6";
  for (const std::string load : {"--concurrency 3", "--rate 100"}) {
    const Json j = bench(load + size + turns, 20);
    EXPECT_THAT(load_of(j), HasSubstr("conversations of 3 turns"));
    EXPECT_EQ(j["verification"]["compared"], 6);
    EXPECT_EQ(j["verification"]["different"], 0);
  }
}

TEST_F(Tools, TracesAreReplayedAtTheirTimes) {
  const std::string azure = file("azure.csv",
                                 "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.5,10,4\n"
                                 "2023-11-16 18:17:13.5,12,2\n2023-11-16 18:17:08.5,6,3\n");
  const Json j = bench("--prompts " + azure + " --time-scale 20 --csv " + folder + "/rows.csv", 3);
  EXPECT_EQ(load_of(j), "replay of " + azure);
  EXPECT_GE(j["figures"]["seconds"].get<double>(), 0.5);  // ten seconds, twenty times as fast
  std::istringstream rows(read(folder + "/rows.csv"));
  std::string row;
  std::getline(rows, row);
  EXPECT_TRUE(row.starts_with("prompt,turn,due_s,sent_s,")) << row;
  for (const char* due : {"0,0,0.000000,", "1,0,0.250000,", "2,0,0.500000,"}) {
    std::getline(rows, row);
    EXPECT_TRUE(row.starts_with(due)) << row;
    EXPECT_TRUE(row.ends_with(",OK")) << row;
  }
  EXPECT_EQ(load_of(bench("--prompts " + azure + " --concurrency 3", 3)), "closed loop, 3 clients");
  const std::string mooncake = file("mooncake.jsonl",
                                    "{\"timestamp\":0,\"input_length\":20,\"output_length\":5,\"hash_ids\":[1]}\n"
                                    "{\"timestamp\":100,\"input_length\":30,\"output_length\":5,\"hash_ids\":[1]}\n");
  const Json m = bench("--prompts " + mooncake, 2);
  EXPECT_EQ(m["figures"]["output_tokens"], 10);
  EXPECT_GT(m["figures"]["cached_tokens"], 0) << "block 1 is shared";
}

TEST_F(Tools, EachOtherProtocolAndComparison) {
  const std::string size = " --input-len 4 --output-len 6 --requests 12 --concurrency 4 --verify 4";
  const std::string http = "127.0.0.1:" + std::to_string(server->http_port());
  bench("--protocol vllm" + size, 12);
  const Json a = bench("--protocol openai" + size, 12, http);
  EXPECT_GE(a["server"].size(), 2u) << "its metrics page is read beside";
  std::filesystem::copy_file(folder + "/report.json", folder + "/a.json");
  bench("--protocol openai-chat" + size, 12, http);
  const Ran r = run("bench --compare " + folder + "/a.json " + folder + "/report.json");
  EXPECT_EQ(r.code, 0) << r.out;
  EXPECT_THAT(r.out, HasSubstr("ttft_ms p99"));
  EXPECT_THAT(r.out, HasSubstr("B / A"));
}

TEST_F(Tools, ATerminalShowsHowItGoes) {
  if (std::system("command -v script > /dev/null") != 0) GTEST_SKIP() << "script (bsdutils) makes the terminal";
  FILE* pipe = popen(("script -qec '" + std::string(KVASIR_EXE) + " bench " + server->address() +
                      " --requests 4 --input-len 4 --output-len 4' /dev/null < /dev/null 2>&1")
                         .c_str(),
                     "r");
  std::string out;
  char buffer[4096];
  for (size_t n; (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;) out.append(buffer, n);
  EXPECT_EQ(pclose(pipe), 0) << out;
  EXPECT_THAT(out, HasSubstr("under way"));
  EXPECT_THAT(out, HasSubstr("tokens a second"));
}

TEST_F(Tools, WhatIsAskedWronglySaysWhatToDo) {
  const auto refused = [](const std::string& arguments, int code = 2) {
    const Ran r = run("bench " + server->address() + " " + arguments);
    EXPECT_EQ(r.code, code) << arguments << "\n" << r.out;
    return r.out;
  };
  EXPECT_THAT(refused("--sweep rate"), HasSubstr("--slo ttft=500ms,itl=50ms"));
  EXPECT_THAT(refused("--sweep rate --slo ttft=1s --rate 3"), HasSubstr("leave out --rate"));
  EXPECT_THAT(refused("--batch 3"), HasSubstr("--protocol ppl"));
  for (const auto& [flags, needs] : std::vector<std::pair<std::string, std::string>>{
           {"--rate 3 --concurrency 4", "concurrency would change nothing here; it needs a closed loop"},
           {"--arrival constant", "it needs an open loop: --rate"},
           {"--rate 3 --arrival at-once", "another --arrival"},
           {"--rate 3 --burstiness 0.5", "--arrival bursty"},
           {"--sweep-low 2", "--sweep"},
           {"--prefix-groups 4", "--shared-prefix"},
           {"--turn-len 4", "--turns"},
           {"--time-scale 2", "the times of a trace"},
           {"--protocol openai --connections 2", "a protocol over gRPC"},
           {"--protocol ppl --model x", "names models"}})
    EXPECT_THAT(refused(flags), HasSubstr(needs));
  EXPECT_THAT(refused("--slo quick=1s"), HasSubstr("write ttft=500ms"));
  EXPECT_THAT(refused("--protocol soap"), HasSubstr("openai-chat"));
  EXPECT_THAT(refused("--arrival sometimes"), HasSubstr("poisson"));
  EXPECT_THAT(refused("--input-len 20-10", 1), HasSubstr("lognormal:MEDIAN,SIGMA"));
  EXPECT_THAT(refused("--prompts /no/such/file", 1), HasSubstr("cannot be opened"));
  EXPECT_THAT(refused("--compare"), HasSubstr("--compare takes two reports"));
  EXPECT_THAT(run("bench http://127.0.0.1:1").out, HasSubstr("over gRPC it must be HOST:PORT"));
  EXPECT_EQ(run("bench nohost").code, 2);
  EXPECT_THAT(run("bench --help").out, HasSubstr("kvasir bench --sweep rate --slo"));
}

// Last: the server ends, and all that was asked of it above runs again.
TEST_F(Tools, WhatTheServerRecordedIsReplayedToTheSamePlans) {
  const int64_t before = static_cast<int64_t>(std::filesystem::file_size(folder + "/run.rec"));
  bench("--rate 100 --requests 30 --input-len 20-60 --output-len 20-40", 30);
  server->signal(SIGTERM);
  EXPECT_EQ(server->wait(), 0);
  EXPECT_GT(static_cast<int64_t>(std::filesystem::file_size(folder + "/run.rec")), before);
  const Ran r = run("simulate --workload " + folder + "/run.rec");
  EXPECT_EQ(r.code, 0) << r.out;
  const Json j = Json::parse(r.out, nullptr, false);
  ASSERT_TRUE(j.is_object()) << r.out;
  EXPECT_EQ(j["identical"], true);
  EXPECT_EQ(j["cut_short"], false);
  EXPECT_GE(j["requests"], 300);
}

}  // namespace
}  // namespace kvasir::e2e
