// kvasir perplexity: the figure llama.cpp's tool prints. Windows of the text stand alone; in each the
// second half is scored.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/command.h"
#include "cli/hub/hub.h"
#include "cli/model_flags.h"
#include "core/config.h"
#include "model/device.h"
#include "model/load.h"
#include "model/runner.h"

namespace kvasir::cli {
namespace {

constexpr int32_t kPage = 16;

struct Score {
  double sum = 0;
  int64_t tokens = 0;
};

// One window in one step, its cache overwritten by the next.
Status score(model::Runner& runner, std::span<const int32_t> window, Score* total) {
  int64_t n = int64_t(window.size()) - 1, first = int64_t(window.size()) / 2;
  model::Batch b;
  b.tokens.assign(window.begin(), window.end() - 1);
  b.seqstarts = {0, n}, b.kvstarts = {0, n}, b.start_pos = {0};
  b.max_seqlen = b.max_kvlen = n;
  if (runner.info().state_bytes > 0) b.states = {0};
  b.max_pages = (n + kPage - 1) / kPage;
  for (int64_t i = 0; i < n; ++i) b.positions.push_back(int32_t(i));
  for (int64_t p = 0; p < b.max_pages; ++p) b.cachestarts.push_back(p * kPage);
  model::SamplingParams params;
  std::vector<model::SampleRow> rows;
  for (int64_t i = first; i < n; ++i) {
    b.logit_rows.push_back(int32_t(i));
    rows.push_back({.params = &params, .position = i + 1, .score_only = true, .target = window[size_t(i + 1)]});
  }
  KVASIR_TRY(runner.launch(b, rows));
  KVASIR_ASSIGN(auto scored, runner.wait());
  for (const model::Sampled& s : scored) {
    if (s.bad_logits) return internal_error("the model's logits are not numbers");
    total->sum -= s.logprob, ++total->tokens;
  }
  return {};
}

Status run(const model::RunnerOptions& base, const std::string& file, int window, bool as_json) {
  std::ifstream in(file, std::ios::binary);
  if (!in) return not_found(cat("cannot read ", file));
  std::string text{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  model::RunnerOptions options = base;
  options.page_size = kPage;
  options.max_batch = 1, options.max_tokens = window, options.max_kvlen = window;
  {
    KVASIR_ASSIGN(auto files, model::open_model(options.model));  // before there is room made for a window of that size
    if (files.config.encoder_layers > 0)
      return failed_precondition(
          cat(options.model, " is an encoder-decoder: its encoder reads a text, and predicts none of it"));
    if (window > files.config.context)
      return invalid_argument(cat("window is ", window, "; the model's context is ", files.config.context));
  }
  KVASIR_ASSIGN(auto runner, model::load_runner(options));
  KVASIR_ASSIGN(auto words, model::load_text(options));
  if (!words.tokenizer) return failed_precondition(cat(options.model, " has no tokenizer"));
  KVASIR_ASSIGN(std::vector<int32_t> ids, words.tokenizer->encode(text, true, false));
  model::CachePages cache = int64_t(window + kPage - 1) / kPage;
  cache.states = 1;
  KVASIR_TRY(runner->allocate_cache(cache));
  int64_t windows = int64_t(ids.size()) / window;
  if (windows == 0) return invalid_argument(cat(file, " has ", ids.size(), " tokens; a window needs ", window));
  // A vocabulary that begins texts with a token begins each window with it.
  int32_t bos = !ids.empty() && ids[0] == words.tokenizer->bos() ? ids[0] : -1;
  Score total;
  for (int64_t w = 0; w < windows; ++w) {
    std::vector<int32_t> part(ids.begin() + w * window, ids.begin() + (w + 1) * window);
    if (bos >= 0) part[0] = bos;
    KVASIR_TRY(score(*runner, part, &total));
    if (!as_json)
      std::fprintf(stderr, "\r%lld/%lld  %.4f", static_cast<long long>(w) + 1, static_cast<long long>(windows),
                   std::exp(total.sum / double(total.tokens)));
  }
  double perplexity = std::exp(total.sum / double(total.tokens));
  if (as_json) {
    nlohmann::ordered_json j = {{"perplexity", perplexity},
                                {"tokens", ids.size()},
                                {"scored", total.tokens},
                                {"window", window},
                                {"model", runner->info().name},
                                {"kv_type", runner->info().kv_type},
                                {"attention_type", runner->info().attention_type}};
    std::puts(j.dump().c_str());
  } else {
    std::fprintf(stderr, "\r");
    std::printf("perplexity %.4f  (%lld windows of %d tokens, %lld scored, cache of %s, attention in %s)\n", perplexity,
                static_cast<long long>(windows), window, static_cast<long long>(total.tokens),
                runner->info().kv_type.c_str(), runner->info().attention_type.c_str());
  }
  return {};
}

int perplexity(int argc, char** argv) {
  model::RunnerOptions options;
  std::string file;
  int window = 512;
  bool as_json = false;
  hub::HubOptions hub;
  Options o("kvasir perplexity", "Measures how well a model predicts a text: lower is better.");
  o.add("model", &options.model, "A GGUF file, a directory, hf:ORG/REPO[:FILE], or dummy:...");
  o.add("file", &file, "The text");
  o.add("window", &window, "Tokens of context; the second half of each is scored").range(4, 1 << 20);
  o.add("device", &options.device, "What it runs on: auto, cpu, cuda, or cuda with the numbers of its GPUs (cuda:1)")
      .value_name("DEVICE");
  o.check([&options] { return model::parse_device(options.device).status(); });
  o.add("threads", &options.threads, "Worker threads; 0 is what the machine allows").range(0, 1024);
  define_attention_dtype(o, options.attention_dtype);
  define_cache_form(o, options.kv);
  o.add("precise", &options.precise, "float32 activations").only_flag();
  o.add("json", &as_json, "One JSON object").only_flag();
  hub.define(o);
  o.example("kvasir perplexity --model model.gguf --file text.txt", "the figure llama.cpp's tool prints");
  if (auto code = o.parse(argc, argv)) return *code;
  if (options.model.empty() || file.empty()) {
    std::fprintf(stderr, "kvasir perplexity: --model and --file are needed\n");
    return kUsage;
  }
  auto path = hub::local_model(options.model, hub);
  if (path.ok()) options.model = *path;
  Status status = !path.ok() ? path.status() : run(options, file, window, as_json);
  if (status.ok()) return kOk;
  std::fprintf(stderr, "kvasir perplexity: %s\n", status.to_string().c_str());
  return kFailed;
}

}  // namespace

extern const Command perplexity_command;
const Command perplexity_command{"perplexity", "measure how well a model predicts a text", perplexity};

}  // namespace kvasir::cli
