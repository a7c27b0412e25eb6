#include "core/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <map>

#include "tests/scratch.h"

namespace kvasir {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

struct Config {
  int http_port = 8000;
  bool grpc = true;
  double share = 0.9;
  std::string policy = "fair";
  std::string api_key;
  ByteSize memory{0};
  milliseconds drain{30000};
  std::vector<std::string> origins;
  uint64_t seed = 0;

  void define(Options& o) {
    o.with_config_file();
    o.section("Server");
    o.add("http_port", &http_port, "TCP port of the HTTP server; 0 turns it off").range(0, 65535);
    o.add("grpc", &grpc, "serve gRPC");
    o.add("origins", &origins, "browser origins to allow");
    o.add("api_key", &api_key, "the key clients must send").secret();
    o.section("Engine");
    o.add("memory", &memory, "memory for the cache").at_least(0);
    o.add("memory_share", &share, "share of the free memory to take").range(0.05, 0.95);
    o.add("policy", &policy, "who goes first").one_of({"fcfs", "fair", "priority"});
    o.add("drain", &drain, "how long to let requests finish").range(0, 3600);
    o.add("seed", &seed, "seed of seeds");
    o.check([this]() -> Status {
      if (http_port == 0 && !grpc) return invalid_argument("http_port is 0 and grpc is off; nothing would be served");
      return {};
    });
  }
};

struct ConfigTest : testing::Test {
  Config c;
  Options o{"kvasir serve", "Serves a model."};
  ConfigTest() { c.define(o); }
  Status flags(std::vector<std::string> args) { return o.load_flags(args); }
  Status json(std::string_view text) { return o.load_json(text, "kvasir.json"); }
  Status env(std::map<std::string, std::string> vars) {
    return o.load_environment([&](const char* n) { return vars.count(n) ? vars[n].c_str() : nullptr; });
  }
};

TEST_F(ConfigTest, EveryKindOfValueIsReadFromEverySource) {
  ASSERT_TRUE(json(R"({ // a comment
    "http_port": 9000, "grpc": false, "memory_share": 0.5, "policy": "fcfs", "memory": "2GiB",
    "drain": "90s", "origins": ["http://a", "http://b"], "seed": 18446744073709551615 })")
                  .ok());
  EXPECT_EQ(c.http_port, 9000);
  EXPECT_FALSE(c.grpc);
  EXPECT_EQ(c.share, 0.5);
  EXPECT_EQ(c.policy, "fcfs");
  EXPECT_EQ(c.memory.bytes, int64_t(2) << 30);
  EXPECT_EQ(c.drain, milliseconds(90000));
  EXPECT_THAT(c.origins, testing::ElementsAre("http://a", "http://b"));
  EXPECT_EQ(c.seed, UINT64_MAX);

  ASSERT_TRUE(env({{"KVASIR_HTTP_PORT", "9001"}, {"KVASIR_GRPC", "1"}, {"KVASIR_ORIGINS", "x,y,z"}}).ok());
  EXPECT_EQ(c.http_port, 9001);
  EXPECT_TRUE(c.grpc);
  EXPECT_THAT(c.origins, testing::ElementsAre("x", "y", "z"));

  ASSERT_TRUE(flags({"--http-port=9002", "--no-grpc", "--memory", "512MiB", "--drain", "1.5s", "--origins", "p",
                     "--origins", "q"})
                  .ok());
  EXPECT_EQ(c.http_port, 9002);
  EXPECT_FALSE(c.grpc);
  EXPECT_EQ(c.memory.bytes, 512 << 20);
  EXPECT_EQ(c.drain, milliseconds(1500));
  EXPECT_THAT(c.origins, testing::ElementsAre("p", "q"));
}

TEST_F(ConfigTest, RefusalsNameTheFieldTheValueAndTheLimit) {
  EXPECT_EQ(flags({"--http-port", "70000"}).message(),
            "--http-port is 70000; it must be between 0 and 65535 (from flag)");
  EXPECT_EQ(env({{"KVASIR_POLICY", "fiar"}}).message(),
            "--policy is fiar; it must be one of fcfs, fair, priority (did you mean fair?) (from $KVASIR_POLICY)");
  EXPECT_THAT(json(R"({"memory_share": 2})").message(),
              HasSubstr("it must be between 0.05 and 0.95 (from kvasir.json, key \"memory_share\")"));
  EXPECT_THAT(flags({"--drain", "2h"}).message(), HasSubstr("between 0ms and 1h"));
  EXPECT_THAT(flags({"--http-port"}).message(), HasSubstr("needs a value"));
  EXPECT_THAT(flags({"--http-port", "80x"}).message(), HasSubstr("whole number"));
  EXPECT_THAT(flags({"--memory", "-1"}).message(), HasSubstr("write a size like"));
  EXPECT_THAT(json(R"({"http_port": "soon"})").message(), HasSubstr("whole number"));
  EXPECT_THAT(json(R"({"http_port": 1.5})").message(), HasSubstr("whole number"));
  EXPECT_THAT(json(R"({"grpc": "yes"})").message(), HasSubstr("it must be true or false"));
  EXPECT_THAT(json(R"({"policy": 3})").message(), HasSubstr("it must be a string"));
  EXPECT_EQ(flags({"--http-port", "70000"}).field(), "http_port");
}

TEST_F(ConfigTest, UnknownNamesGetTheNearestOne) {
  EXPECT_EQ(flags({"--htp-port", "1"}).message(), "unknown flag --htp-port; did you mean --http-port?");
  EXPECT_EQ(json(R"({"polcy": "fair"})").message(), "kvasir.json: unknown key polcy; did you mean policy?");
  EXPECT_EQ(json(R"({"port": 1})").message(), "kvasir.json: unknown key port; did you mean http_port?");
  EXPECT_THAT(flags({"--zzzzzzzzzzzz"}).message(), HasSubstr("--help` lists"));
  EXPECT_THAT(flags({"stray"}).message(), HasSubstr("unexpected argument \"stray\""));
  EXPECT_THAT(flags({"-x"}).message(), HasSubstr("unknown flag -x"));
  const char* environment[] = {"KVASIR_HTP_PORT=1", "KVASIR_SERVICE_HOST=10.0.0.1", "PATH=/bin", nullptr};
  EXPECT_THAT(o.suspicious_variables(environment),
              testing::ElementsAre("$KVASIR_HTP_PORT is not read; did you mean $KVASIR_HTTP_PORT?"));
}

TEST_F(ConfigTest, AFlagThatIsGivenTwiceIsPointedOut) {
  std::vector<std::string> warnings;
  const char* argv[] = {"kvasir serve",
                        "--policy",
                        "fcfs",
                        "--drain",
                        "5",
                        "--origins",
                        "a",
                        "--origins",
                        "b",
                        "--grpc",
                        "--grpc",
                        "--policy=priority",
                        "--api-key",
                        "x",
                        "--api-key=y"};
  EXPECT_EQ(o.parse(std::size(argv), argv, &warnings), std::nullopt);
  EXPECT_EQ(c.policy, "priority");
  EXPECT_EQ(c.origins, (std::vector<std::string>{"a", "b"}));
  EXPECT_THAT(warnings, testing::ElementsAre("--api-key is given more than once; the last value counts",
                                             "--policy is given more than once; the last value counts, \"priority\""));
}

// A server's log may be JSON: a line of another kind would spoil it.
TEST_F(ConfigTest, WarningsAreLeftToACallerThatLogs) {
  ::setenv("KVASIR_HTP_PORT", "1", 1);
  const char* argv[] = {"kvasir serve"};
  std::vector<std::string> warnings;
  testing::internal::CaptureStderr();
  EXPECT_EQ(o.parse(1, argv, &warnings), std::nullopt);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_THAT(warnings, testing::ElementsAre(HasSubstr("did you mean $KVASIR_HTTP_PORT?")));
  testing::internal::CaptureStderr();
  EXPECT_EQ(o.parse(1, argv), std::nullopt);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("did you mean $KVASIR_HTTP_PORT?"));
  ::unsetenv("KVASIR_HTP_PORT");
}

TEST_F(ConfigTest, BrokenFilesAreRefusedWithTheirPlace) {
  EXPECT_THAT(json("{\n \"http_port\": }").message(), HasSubstr("kvasir.json: parse error at line 2"));
  EXPECT_THAT(json("[1]").message(), HasSubstr("must be one JSON object"));
  EXPECT_THAT(json(R"({"seed": 1, "seed": 2})").message(), HasSubstr("\"seed\" appears twice"));
  EXPECT_FALSE(json(std::string(100000, '[')).ok());
  EXPECT_FALSE(json(R"({"config": "other.json"})").ok());
  EXPECT_THAT(o.load_file("/nonexistent.json").message(), HasSubstr("cannot read the configuration file"));
}

TEST_F(ConfigTest, PrintedConfigReadsBackAndHidesSecrets) {
  ASSERT_TRUE(flags({"--http-port", "9", "--origins", "say \"hi\"", "--api-key", "sesame", "--drain", "61s"}).ok());
  std::string printed = o.print_config();
  EXPECT_THAT(printed, HasSubstr("\"http_port\": 9,  // flag"));
  EXPECT_THAT(printed, Not(HasSubstr("sesame")));
  EXPECT_THAT(printed, HasSubstr("\"api_key\": set, not shown"));
  Config again;
  Options other("kvasir serve", "");
  again.define(other);
  Status status = other.load_json(printed, "printed");
  ASSERT_TRUE(status.ok()) << status.message() << "\n" << printed;
  EXPECT_EQ(again.http_port, 9);
  EXPECT_EQ(again.drain, milliseconds(61000));
  EXPECT_EQ(again.origins, c.origins);
  EXPECT_THAT(flags({"--api-key"}).message(), Not(HasSubstr("sesame")));
}

TEST_F(ConfigTest, HelpComesFromTheSameTable) {
  o.example("kvasir serve --http-port 9000", "serve on another port");
  std::string help = o.help_text();
  for (auto text :
       {"--http-port N", "(from 0 to 65535; default 8000)", "--policy fcfs|fair|priority", "--no-grpc turns",
        "--drain DURATION", "from 0ms to 1h", "Server:", "Engine:", "Examples:", "serve on another port"})
    EXPECT_THAT(help, HasSubstr(text));
  for (size_t begin = 0, end; (end = help.find('\n', begin)) != std::string::npos; begin = end + 1)
    EXPECT_LE(end - begin, 100u) << help.substr(begin, end - begin);
}

TEST_F(ConfigTest, FlagsWinOverEnvironmentOverFile) {
  const ScratchFolder folder;
  const std::string path =
      folder.file("c.json", R"({"http_port": 1, "policy": "fcfs", "memory": "1MiB", "origins": ["file"]})");
  setenv("KVASIR_HTTP_PORT", "2", 1);
  setenv("KVASIR_POLICY", "priority", 1);
  const char* argv[] = {"serve", "--config", path.c_str(), "--http-port", "3", "--origins", "a", "--origins", "b"};
  EXPECT_EQ(o.parse(std::size(argv), argv), std::nullopt);
  unsetenv("KVASIR_HTTP_PORT");
  unsetenv("KVASIR_POLICY");
  EXPECT_EQ(c.http_port, 3);
  EXPECT_EQ(c.policy, "priority");
  EXPECT_EQ(c.memory.bytes, 1 << 20);
  EXPECT_THAT(c.origins, testing::ElementsAre("a", "b"));
}

TEST_F(ConfigTest, ParseSaysWhenToExit) {
  auto run = [&](std::vector<const char*> args) {
    args.insert(args.begin(), "serve");
    return o.parse(int(args.size()), args.data());
  };
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  EXPECT_EQ(run({"--no-grpc", "--http-port", "0"}), 2);  // the rule over the whole
  EXPECT_EQ(run({"--grpc", "--check-config"}), 0);
  EXPECT_EQ(run({"--help"}), 0);
  EXPECT_THAT(testing::internal::GetCapturedStdout(), HasSubstr("the configuration is right"));
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("nothing would be served"));
}

TEST(Options, ArgumentsWithoutAFlag) {
  std::string model;
  std::vector<std::string> words;
  int n = 1;
  Options o("kvasir generate", "Generates.");
  o.positional("model", &model, "the model");
  o.positional("prompt", &words, "the prompt");
  o.add("n", &n, "how many").range(1, 8);
  std::vector<std::string> args{"m.gguf", "once", "--n", "2", "--", "--upon"};
  ASSERT_TRUE(o.load_flags(args).ok());
  EXPECT_EQ(model, "m.gguf");
  EXPECT_THAT(words, testing::ElementsAre("once", "--upon"));
  EXPECT_EQ(n, 2);
  EXPECT_THAT(o.help_text(), HasSubstr("Usage: kvasir generate [model] [prompt...] [options]"));
}

// A command may have a --config of its own, which is no file of options.
TEST(Options, OnlyWhoAskedForItHasAFile) {
  std::vector<std::string> files;
  Options o("kvasir simulate", "Simulates.");
  o.add("config", &files, "a file of something else");
  setenv("KVASIR_CONFIG", "/nonexistent", 1);
  EXPECT_TRUE(o.load({}, [](const char* name) { return static_cast<const char*>(std::getenv(name)); }).ok());
  unsetenv("KVASIR_CONFIG");
  EXPECT_THAT(files, testing::ElementsAre("/nonexistent"));
  EXPECT_THAT(o.help_text(), testing::Not(HasSubstr("JSON file")));
}

TEST(Units, SizesAndDurations) {
  EXPECT_EQ(parse_bytes("1.5GiB").value().bytes, int64_t(3) << 29);
  EXPECT_EQ(parse_bytes("4 GB").value().bytes, 4000000000);
  EXPECT_FALSE(parse_bytes("1e30").ok());
  EXPECT_FALSE(parse_bytes("GB").ok());
  EXPECT_FALSE(parse_bytes("99999999TB").ok());
  EXPECT_EQ(parse_duration("2h").value(), milliseconds(7200000));
  EXPECT_EQ(parse_duration("2").value(), milliseconds(2000));
  EXPECT_FALSE(parse_duration("-1s").ok());
  EXPECT_FALSE(parse_duration("soon").ok());
}

TEST(ForeignNames, AnAliasIsTheOptionAndWhatIsNotSoIsRefusedWithAReason) {
  int port = 1, batch = 2;
  Options o("test", "");
  o.add("grpc_port", &port, "a port").range(0, 65535);
  o.add("batch", &batch, "a size");
  o.alias("port", "grpc_port");
  o.foreign("ranks", {"1"}, "there is one device");
  o.foreign("profile", {"false"}, "there is a trace", true);
  o.foreign("hint", {}, "shapes say it");
  EXPECT_TRUE(o.load_json(R"({"port": 23333, "ranks": 1, "profile": false})", "ppl.json").ok());
  EXPECT_EQ(port, 23333);
  std::vector<std::string> args{"--port", "7", "--ranks", "1", "--profile=false", "--batch", "5", "--ranks=1"};
  EXPECT_TRUE(o.load_flags(args).ok());
  EXPECT_EQ(port, 7);
  EXPECT_EQ(batch, 5);
  const Status two = o.load_json(R"({"ranks": 2})", "ppl.json");
  EXPECT_EQ(two.message(), "ppl.json: ranks is 2, and can only be 1: there is one device");
  EXPECT_EQ(two.field(), "ranks");
  EXPECT_EQ(o.load_json(R"({"hint": "x"})", "ppl.json").message(),
            "ppl.json: hint is x, and is not served: shapes say it");
  args = {"--profile"};
  EXPECT_EQ(o.load_flags(args).message(), "profile is true, and can only be false: there is a trace");
  EXPECT_FALSE(o.load_json(R"({"port": 70000})", "ppl.json").ok());
  EXPECT_FALSE(o.load_json(R"({"topk": 1})", "ppl.json").ok());
}

}  // namespace
}  // namespace kvasir
