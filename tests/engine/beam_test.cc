// Beam search: what transformers' generate() finds (make_beams.py), alone, among others, and when pages are few.
#include "tests/engine/real_case.h"
#include "tests/model/small_network.h"

namespace kvasir::engine::testing {
namespace {

using nlohmann::json;

struct Found {
  std::vector<std::vector<int32_t>> tokens;
  std::vector<float> scores;
  bool operator==(const Found&) const = default;
};

Request search(const json& run) {
  Request r;
  r.prompt = run["prompt"].get<std::vector<int32_t>>();
  r.stop_tokens = run["stops"].get<std::vector<int32_t>>();
  r.max_tokens = run["max_new"].get<int64_t>();
  r.n = run["n"];
  r.ignore_eos = r.include_stop = true;
  r.detokenize = false;
  using Early = BeamOptions::Early;
  const std::string early = run["early"];
  r.beams = BeamOptions{run["width"], run["length_penalty"],
                        early == "yes"     ? Early::yes
                        : early == "never" ? Early::never
                                           : Early::no};
  return r;
}

Found found(Stream& stream) {
  Found out;
  Answer a = read(stream);
  EXPECT_TRUE(a.complete()) << a.failed.message();
  out.tokens = a.tokens;
  out.scores.resize(a.finished.size());
  for (const Finished& f : a.finished) {
    EXPECT_TRUE(f.score.has_value());
    out.scores[size_t(f.choice)] = f.score.value_or(0);
  }
  return out;
}

std::unique_ptr<Engine> serve(const json& network, EngineOptions options) {
  model::Folder folder("beams");
  model::write_network(folder, network["config"]);
  model::RunnerOptions m;
  m.model = folder.path.string();
  m.threads = 1, m.precise = true;
  auto engine = Engine::start(m, std::move(options));
  const Status ready = engine->wait_ready();
  EXPECT_TRUE(ready.ok()) << ready.message();
  return engine;
}

EngineOptions plenty() {
  EngineOptions o;
  o.page_size = 4;
  o.max_running = 64;
  o.max_tokens_per_step = 96;
  o.kv_memory = 64 << 20;
  return o;
}

json networks() {
  std::ifstream in("tests/engine/fixtures/beams.json");
  EXPECT_TRUE(in.good());
  return json::parse(in);
}

void expect_theirs(const Found& ours, const json& run) {
  const json& theirs = run["answers"];
  ASSERT_EQ(ours.tokens.size(), theirs.size());
  for (size_t i = 0; i < theirs.size(); ++i) {
    EXPECT_EQ(ours.tokens[i], theirs[i]["tokens"].get<std::vector<int32_t>>())
        << "answer " << i << " of " << run["width"];
    EXPECT_NEAR(ours.scores[i], theirs[i]["score"].get<double>(), 1e-3);
  }
}

TEST(Beams, AreThoseOfTransformers) {
  for (const json& network : networks()) {
    auto engine = serve(network, plenty());
    for (const json& run : network["runs"]) expect_theirs(found(**engine->submit(search(run))), run);
    expect_all_pages_back(*engine);
  }
}

// Widths differ by request, beside prompts and decodes in one step.
TEST(Beams, AreTheSameBesideOthers) {
  for (const json& network : networks()) {
    auto engine = serve(network, plenty());
    std::vector<std::unique_ptr<Stream>> streams, others;
    for (const json& run : network["runs"]) {
      streams.push_back(std::move(*engine->submit(search(run))));
      Request plain = ask(30, 40, int32_t(streams.size()));
      for (int32_t& t : plain.prompt) t %= 64;
      others.push_back(std::move(*engine->submit(std::move(plain))));
    }
    for (size_t i = 0; i < streams.size(); ++i) expect_theirs(found(*streams[i]), network["runs"][i]);
    for (auto& stream : others) EXPECT_TRUE(read(*stream).complete());
    expect_all_pages_back(*engine);
  }
}

// A search is let in with the pages that it may need: where they are few, searches wait for one another.
TEST(Beams, AreTheSameWhenPagesAreFew) {
  constexpr int64_t kFewPages = 120, kPage = 4;
  const json network = networks()[1];
  EngineOptions few = plenty();
  few.prefix_cache = false;
  few.kv_memory = kPage * (2 * 3 * 3 * 16 * 4) * kFewPages;
  auto engine = serve(network, few);
  EXPECT_EQ(engine->stats().pages_total, kFewPages);
  int64_t tokens = 0;
  std::vector<std::unique_ptr<Stream>> streams;
  for (const json& run : network["runs"]) {
    tokens += run["width"].get<int64_t>() * run["max_new"].get<int64_t>() + int64_t(run["prompt"].size());
    streams.push_back(std::move(*engine->submit(search(run))));
  }
  EXPECT_GT(tokens, 2 * kFewPages * kPage) << "they fit all at once";
  for (size_t i = 0; i < streams.size(); ++i) expect_theirs(found(*streams[i]), network["runs"][i]);
  expect_all_pages_back(*engine);
}

TEST(Beams, WhatTheyCannotHaveIsRefusedByName) {
  const json network = networks()[0];
  auto engine = serve(network, plenty());
  auto refused = [&](auto change) {
    Request r = search(network["runs"][2]);
    change(r);
    auto stream = engine->submit(std::move(r));
    return stream.ok() ? std::string("accepted") : stream.status().field();
  };
  EXPECT_EQ(refused([](Request& r) { r.beams->width = 0; }), "beam_width");
  EXPECT_EQ(refused([](Request& r) { r.beams->width = 65; }), "beam_width");
  EXPECT_EQ(refused([](Request& r) { r.beams->width = 40; }), "beam_width");  // 2 kinds of next token each, of 64
  EXPECT_EQ(refused([](Request& r) { r.n = 5; }), "n");
  EXPECT_EQ(refused([](Request& r) { r.beams->length_penalty = NAN; }), "length_penalty");
  EXPECT_EQ(refused([](Request& r) { r.max_tokens = 0; }), "max_tokens");
  EXPECT_EQ(refused([](Request& r) { r.min_tokens = 1; }), "min_tokens");
  EXPECT_EQ(refused([](Request& r) { r.allowed_tokens = {1, 2}; }), "allowed_token_ids");
  EXPECT_EQ(refused([](Request& r) { r.grammar.kind = text::GrammarSpec::Kind::regex; }), "grammar");
}

// A search that is cancelled, or whose client goes, leaves nothing behind.
TEST(Beams, GiveTheirPagesBackWhenCancelled) {
  const json network = networks()[1];
  auto engine = serve(network, plenty());
  for (int i = 0; i < 6; ++i) {
    Request r = search(network["runs"][9]);
    r.id = "s" + std::to_string(i);  // one that nobody reads may still be ending
    auto stream = std::move(*engine->submit(std::move(r)));
    if (i % 2) {
      engine->cancel("", "s" + std::to_string(i));
      (void)read(*stream);
    }
  }
  expect_all_pages_back(*engine);
}

}  // namespace
}  // namespace kvasir::engine::testing
