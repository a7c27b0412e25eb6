// Adapters through the engine: each request has the tokens of its own, whoever runs beside it, by whatever pages it
// comes to; names are given and taken back while requests run, and nobody loses anything by it.
#include "tests/model/adapters.h"

#include <gmock/gmock.h>

#include <future>
#include <thread>

#include "engine/engine.h"
#include "model/runner.h"
#include "tests/model/drive.h"

namespace kvasir::engine {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::UnorderedElementsAre;
using Ids = std::vector<int32_t>;

const char* const kNames[] = {"plain", "rsLoRA", "DoRA"};

struct Answer {
  Ids tokens;
  int64_t cached = 0;
  Status failed;
};

Answer read(Stream& stream) {
  Answer out;
  while (auto event = stream.next()) {
    if (auto* tokens = std::get_if<Tokens>(&*event))
      for (const TokenOut& t : tokens->tokens) out.tokens.push_back(t.id);
    if (auto* finished = std::get_if<Finished>(&*event)) out.cached = finished->usage.cached_tokens;
    if (auto* failed = std::get_if<Failed>(&*event)) out.failed = failed->status;
  }
  return out;
}

class AdaptersOfAnEngine : public testing::Test {
 protected:
  AdaptersOfAnEngine() : folder_("engine-adapters") {
    const json networks = model::fixture("architectures.json");
    for (const json& one : networks["cases"])
      if (one["name"] == "llama") model::StoredNetwork(one).write_folder(folder_);
    const json stored = model::fixture("adapters.json");
    for (const json& one : stored["cases"])
      for (const char* name : kNames)
        if (one["name"] == name) model::StoredAdapter(one).write(folder_.path / name);
    for (int32_t i = 0; i < 40; ++i) prompt_.push_back((7 * i * i + 3 * i + 1) % 256);
  }

  std::string path(const std::string& name) const { return (folder_.path / name).string(); }
  std::unique_ptr<Engine> start(EngineOptions options = {}, bool with_adapters = true) const {
    model::RunnerOptions runner;
    runner.model = folder_.path.string();
    runner.device = "cpu";
    runner.threads = 2;
    options.kv_memory = options.kv_memory > 0 ? options.kv_memory : 4 << 20;
    for (const char* name : kNames)
      if (with_adapters) options.adapters.push_back({name, path(name)});
    auto engine = Engine::start(runner, options);
    const Status ready = engine->wait_ready();
    EXPECT_TRUE(ready.ok()) << ready.message();
    return engine;
  }
  Request request(const std::string& adapter, size_t prompt = 40, int64_t tokens = 64) const {
    Request r;
    r.prompt = Ids(prompt_.begin(), prompt_.begin() + int64_t(prompt));
    r.adapter = adapter;
    r.max_tokens = tokens;
    r.ignore_eos = true;
    r.detokenize = false;
    r.sampling.temperature = 0;
    return r;
  }
  static Answer ask(Engine& engine, Request r) {
    auto stream = engine.submit(std::move(r));
    if (!stream.ok()) return {.failed = stream.status()};
    return read(**stream);
  }

  model::Folder folder_;
  Ids prompt_;
};

TEST_F(AdaptersOfAnEngine, AloneAndTogetherAreTheSameTokens) {
  std::vector<std::string> names{""};
  names.insert(names.end(), std::begin(kNames), std::end(kNames));
  std::vector<Ids> alone;
  {
    EngineOptions cold;
    cold.prefix_cache = false;
    auto engine = start(cold);
    for (const std::string& name : names) alone.push_back(ask(*engine, request(name)).tokens);
  }
  for (size_t i = 0; i < alone.size(); ++i) {
    ASSERT_EQ(alone[i].size(), 64u);
    for (size_t j = 0; j < i; ++j) EXPECT_NE(alone[i], alone[j]) << names[i] << " and " << names[j];
  }
  // All at once, in chunks of prompts, and in a cache that has no room for all of them.
  for (int64_t memory : {int64_t(4) << 20, int64_t(96) << 10}) {
    EngineOptions options;
    options.kv_memory = memory;
    options.max_tokens_per_step = 32;
    options.max_running = 16;
    auto engine = start(options);
    for (int round = 0; round < 2; ++round) {  // the second finds the first's pages
      std::vector<std::unique_ptr<Stream>> streams;
      for (int copy = 0; copy < 3; ++copy)
        for (const std::string& name : names) streams.push_back(std::move(*engine->submit(request(name))));
      for (size_t i = 0; i < streams.size(); ++i) {
        const Answer got = read(*streams[i]);
        ASSERT_TRUE(got.failed.ok()) << got.failed.message();
        EXPECT_EQ(got.tokens, alone[i % names.size()]) << names[i % names.size()] << ", round " << round;
      }
    }
    const Stats stats = engine->stats();
    EXPECT_GT(memory < 1 << 20 ? stats.preemptions : stats.cached_tokens, 0);
  }
}

TEST_F(AdaptersOfAnEngine, PagesAreSharedWithinAnAdapterAlone) {
  auto engine = start();
  EXPECT_EQ(ask(*engine, request("plain")).cached, 0);
  EXPECT_EQ(ask(*engine, request("DoRA")).cached, 0);
  EXPECT_EQ(ask(*engine, request("")).cached, 0);
  EXPECT_GT(ask(*engine, request("plain")).cached, 0);
  EXPECT_GT(ask(*engine, request("")).cached, 0);
  // Another under the same name has nothing of the first's.
  ASSERT_TRUE(engine->unload_adapter("plain").ok());
  ASSERT_TRUE(engine->load_adapter("plain", path("rsLoRA")).ok());
  const Answer other = ask(*engine, request("plain"));
  EXPECT_EQ(other.cached, 0);
  EXPECT_EQ(other.tokens, ask(*engine, request("rsLoRA")).tokens);
}

TEST_F(AdaptersOfAnEngine, UnloadingUnderLoadLosesNothing) {
  auto engine = start();
  std::map<std::string, Ids> expected;
  for (const char* name : kNames) expected[name] = ask(*engine, request(name, 40, 60)).tokens;
  std::atomic<bool> over{false};
  std::vector<std::future<int>> clients;
  for (const char* name : kNames)
    clients.push_back(std::async(std::launch::async, [&, name] {
      int answered = 0;
      while (!over || answered == 0) {
        const Answer got = ask(*engine, request(name, 40, 60));
        if (!got.failed.ok()) {
          EXPECT_EQ(got.failed.code(), Code::not_found) << got.failed.message();
          continue;
        }
        EXPECT_EQ(got.tokens, expected[name]) << name;
        ++answered;
      }
      return answered;
    }));
  for (int i = 0; i < 30; ++i) {
    const char* name = kNames[i % 3];
    EXPECT_TRUE(engine->unload_adapter(name).ok());
    EXPECT_THAT(engine->submit(request(name)).status().message(), HasSubstr("is not loaded"));
    const auto back = engine->load_adapter(name, path(name));
    EXPECT_TRUE(back.ok()) << back.status().message();
  }
  over = true;
  for (auto& client : clients) EXPECT_GT(client.get(), 0);
}

TEST_F(AdaptersOfAnEngine, WhatCannotBeLoadedChangesNothing) {
  auto engine = start();
  const Ids before = ask(*engine, request("plain")).tokens;
  auto refused = [&](const std::string& name, const std::string& from) {
    auto got = engine->load_adapter(name, from);
    EXPECT_FALSE(got.ok());
    return got.status();
  };
  EXPECT_EQ(refused("plain", path("DoRA")).code(), Code::already_exists);
  EXPECT_THAT(refused("other", path("nowhere")).message(), HasSubstr("does not exist"));
  for (const char* name : {"", "a b", "../x", "a\"b", "-a"})
    EXPECT_THAT(refused(name, path("DoRA")).message(), HasSubstr("an adapter's name has")) << name;
  EXPECT_FALSE(refused(std::string(129, 'a'), path("DoRA")).ok());
  EXPECT_EQ(engine->unload_adapter("other").code(), Code::not_found);
  EXPECT_THAT(ask(*engine, request("other")).failed.message(), HasSubstr("'other' is not loaded"));
  std::vector<std::string> names;
  for (const AdapterInfo& a : engine->adapters()) names.push_back(a.name);
  EXPECT_THAT(names, UnorderedElementsAre("plain", "rsLoRA", "DoRA"));
  EXPECT_EQ(ask(*engine, request("plain")).tokens, before);
}

TEST_F(AdaptersOfAnEngine, MemoryIsBoundedByWhatIsHeld) {
  EngineOptions options;
  auto probe = start();
  const int64_t one = probe->adapters()[0].bytes;  // DoRA, the largest
  options.adapter_memory = one + one / 4;
  auto engine = start(options, false);
  ASSERT_TRUE(engine->load_adapter("a", path("DoRA")).ok());
  EXPECT_EQ(engine->load_adapter("b", path("DoRA")).status().code(), Code::resource_exhausted);
  // What a request holds still counts.
  auto held = engine->submit(request("a", 40, 80));
  ASSERT_TRUE(held.ok());
  ASSERT_TRUE(engine->unload_adapter("a").ok());
  EXPECT_EQ(engine->load_adapter("b", path("DoRA")).status().code(), Code::resource_exhausted);
  EXPECT_EQ(read(**held).tokens.size(), 80u);
  held->reset();
  for (int i = 0; i < 600 && !engine->load_adapter("b", path("DoRA")).ok(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // until the step that ran it is forgotten, too
  ASSERT_EQ(engine->adapters().size(), 1u);
  EXPECT_EQ(engine->adapters()[0].name, "b");
}

TEST_F(AdaptersOfAnEngine, AModelWhoseAdapterIsBrokenDoesNotStart) {
  model::RunnerOptions runner;
  runner.model = folder_.path.string();
  runner.device = "cpu";
  EngineOptions options;
  options.kv_memory = 4 << 20;
  options.adapters = {{"x", path("nowhere")}};
  auto engine = Engine::start(runner, options);
  EXPECT_THAT(engine->wait_ready().message(), HasSubstr("the adapter 'x' cannot be loaded"));
}

}  // namespace
}  // namespace kvasir::engine
