// What masks cost: steps of 16 sequences under a JSON schema beside steps of the same sequences without one, by turns
// in one run, and how long grammars take to compile on their own thread.
//   grammar_bench MODEL [threads] [rounds]      one JSON object on stdout
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "core/host.h"
#include "engine/engine.h"

namespace kvasir::engine {
namespace {

constexpr int kSequences = 16, kTokens = 96;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double quantile(std::vector<double> v, double q) {
  std::sort(v.begin(), v.end());
  return v[size_t(q * double(v.size() - 1))];
}

// Records without end, of what schemas ask for: texts, names out of few, numbers within bounds, dates, patterns.
std::string schema(int number) {
  return R"({"type":"array","minItems":500,"items":{"type":"object","additionalProperties":false,
    "required":["name","kind","price","tags","when","code"],"properties":{
    "name":{"type":"string","maxLength":)" +
         std::to_string(20 + number) + R"(},"kind":{"enum":["circle","square","line"]},
    "price":{"type":"number","minimum":0,"maximum":1000},"tags":{"type":"array","items":{"type":"string","maxLength":12},"maxItems":3},
    "when":{"type":"string","format":"date"},"code":{"type":"string","pattern":"^[A-Z]{2}-[0-9]{1,4}$"},
    "more":{"anyOf":[{"type":"boolean"},{"type":"null"},{"type":"object","properties":{"x":{"type":"integer"}}}]}}}})";
}

struct Figures {
  double spent = 0, drawn = 0;
  std::vector<double> steps;  // seconds from one's beginning to the next one's
  double step() const { return spent / drawn * kSequences; }
};

Status decode(Engine& engine, bool masked, Figures& figures) {
  const uint64_t before = uint64_t(engine.stats().steps);
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < kSequences; ++i) {
    Request r;
    KVASIR_ASSIGN(r.prompt, engine.tokenizer()->encode("A list of records, as JSON:\n", true, false));
    r.max_tokens = kTokens;
    r.ignore_eos = !masked;
    r.sampling.temperature = 0.7f;
    r.sampling.seed = uint64_t(i);
    if (masked) r.grammar = {text::GrammarSpec::Kind::json_schema, schema(i % 4), {}};
    KVASIR_ASSIGN(auto stream, engine.submit(std::move(r)));
    streams.push_back(std::move(stream));
  }
  for (auto& stream : streams)
    while (auto event = stream->next())
      if (auto* failed = std::get_if<Failed>(&*event)) return failed->status;
  // A sequence whose mask is late draws nothing in a step, so steps are weighed by what they drew.
  double spent = 0, drawn = 0;
  std::vector<double> out;
  const auto samples = engine.recent_steps();
  for (size_t i = 1; i < samples.size(); ++i) {
    if (samples[i - 1].step < before || samples[i - 1].prefills > 0 || samples[i].prefills > 0) continue;
    const double took = std::chrono::duration<double>(samples[i].began - samples[i - 1].began).count();
    spent += took;
    drawn += samples[i - 1].decodes - samples[i - 1].late;
    out.push_back(took);
  }
  if (drawn < kSequences * kTokens / 2) return internal_error("too few steps were seen");
  figures.spent += spent, figures.drawn += drawn;
  figures.steps.insert(figures.steps.end(), out.begin(), out.end());
  return {};
}

Status run(const char* model, int threads, int rounds) {
  model::RunnerOptions m;
  m.model = model;
  m.threads = threads;
  EngineOptions o;
  o.max_running = kSequences;
  o.kv_memory = 256 << 20;
  o.prefix_cache = false;
  o.event_buffer = 1 << 20;
  auto engine = Engine::start(m, o);
  KVASIR_TRY(engine->wait_ready());

  double begin = now();
  KVASIR_ASSIGN(auto compiler, text::GrammarCompiler::create(engine->tokenizer()));
  const double first = now() - begin;
  std::vector<double> compile, again;
  for (int i = 0; i < 20; ++i) {
    for (auto* times : {&compile, &again}) {
      begin = now();
      KVASIR_TRY(compiler->compile({text::GrammarSpec::Kind::json_schema, schema(i), {}}).status());
      times->push_back(now() - begin);
    }
  }
  Figures unused, with, without;
  KVASIR_TRY(decode(*engine, true, unused));
  for (int i = 0; i < rounds; ++i) {
    KVASIR_TRY(decode(*engine, false, without));
    KVASIR_TRY(decode(*engine, true, with));
  }
  std::printf(
      "{\"sequences\": %d, \"threads\": %d, \"step_ms\": %.3f, \"step_with_masks_ms\": %.3f, \"step_p99_ms\": %.3f, "
      "\"step_with_masks_p99_ms\": %.3f, \"share_of_masks\": %.4f, \"sequences_a_step\": %.2f, \"bar\": 0.10, "
      "\"first_grammar_ms\": %.1f, "
      "\"compile_p50_ms\": %.2f, \"compile_p99_ms\": %.2f, \"compile_again_ms\": %.3f}\n",
      kSequences, threads, 1e3 * without.step(), 1e3 * with.step(), 1e3 * quantile(without.steps, 0.99),
      1e3 * quantile(with.steps, 0.99), 1 - without.step() / with.step(), with.drawn / double(with.steps.size()),
      1e3 * first, 1e3 * quantile(compile, 0.5), 1e3 * quantile(compile, 0.99), 1e3 * quantile(again, 0.5));
  return {};
}

}  // namespace
}  // namespace kvasir::engine

int main(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: grammar_bench MODEL [threads] [rounds]\n"), 2;
  const int threads = argc > 2 ? std::atoi(argv[2]) : kvasir::host_limits().cpus;
  auto status = kvasir::engine::run(argv[1], threads, argc > 3 ? std::atoi(argv[3]) : 3);
  if (!status.ok()) return std::fprintf(stderr, "grammar_bench: %s\n", status.to_string().c_str()), 1;
  return 0;
}
