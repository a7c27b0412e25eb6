// From a model's name to what the step loop runs.
#include <chrono>
#include <future>

#include "core/cat.h"
#include "core/log.h"
#include "engine/draft_head.h"
#include "engine/draft_model.h"
#include "engine/engine.h"
#include "model/dated_template.h"
#include "model/device.h"
#include "model/formats/mapped_file.h"
#include "model/head.h"

namespace kvasir::engine {
namespace {

constexpr size_t kMostTemplateBytes = 1 << 20;

Result<std::string> read_template(const std::string& path) {
  auto file = model::MappedFile::open(path);
  if (!file.ok())
    return Status(file.status().code(), cat("the chat template cannot be read: ", file.status().message()))
        .with_field("chat_template");
  const std::span<const uint8_t> text = (*file)->bytes();
  if (text.size() > kMostTemplateBytes)
    return invalid_argument(
               cat("the chat template ", path, " has ", text.size(), " bytes; the most is ", kMostTemplateBytes))
        .with_field("chat_template");
  return std::string(text.begin(), text.end());
}

// How long each part of loading took, at level debug.
class Timed {
 public:
  explicit Timed(const char* what) : what_(what) {}
  ~Timed() {
    log_debug("loaded", {{"what", what_}, {"seconds", std::chrono::duration<double>(Clock::now() - began_).count()}});
  }

 private:
  using Clock = std::chrono::steady_clock;
  const char* what_;
  Clock::time_point began_ = Clock::now();
};

struct Text {
  text::TokenizerPtr tokenizer;
  std::shared_ptr<const text::ChatTemplate> chat_template;
};

Result<Text> read_text(const model::RunnerOptions& model, const std::string& template_file, bool dates) {
  Timed timed("text");
  KVASIR_ASSIGN(model::ModelText text, model::load_text(model));
  if (text.tokenizer && !template_file.empty()) {
    KVASIR_ASSIGN(std::string source, read_template(template_file));
    KVASIR_ASSIGN(text.chat_template, text::ChatTemplate::compile(source, *text.tokenizer));
  }
  if (text.chat_template && dates) text.chat_template = model::dated_template(std::move(text.chat_template));
  return Text{std::move(text.tokenizer), std::move(text.chat_template)};
}

// On the same device (of several GPUs the first), with a cache of 16 bits that is indexed by pages; what else is said
// is of the model itself.
model::RunnerOptions draft_options(const model::RunnerOptions& model, const std::string& draft) {
  model::RunnerOptions out;
  out.model = draft;
  out.device = model.device, out.attention = model.attention, out.threads = model.threads;
  if (const auto choice = model::parse_device(model.device); choice.ok() && choice->gpus.size() > 1)
    out.device = cat("cuda:", choice->gpus[0]);
  out.precise = model.precise, out.page_size = model.page_size, out.graphs = model.graphs;
  out.max_batch = model.max_batch, out.max_tokens = model.max_tokens;
  return out;
}

Result<std::unique_ptr<model::Runner>> load_draft(const model::RunnerOptions& model, const std::string& name,
                                                  const Loaded& loaded) {
  Timed timed("draft model");
  auto named = [](const Status& s) {
    return Status(s.code(), cat("draft_model cannot be loaded: ", s.message())).with_field("draft_model");
  };
  const model::RunnerOptions options = draft_options(model, name);
  auto text = model::load_text(options);
  if (!text.ok()) return named(text.status());
  auto runner = model::load_runner(options);
  if (!runner.ok()) return named(runner.status());
  if ((*runner)->info().encoder || loaded.runner->info().encoder)
    return invalid_argument(cat("draft_model is ", name, "; ", (*runner)->info().encoder ? "it" : "the model",
                                " is an encoder, which draws no tokens"))
        .with_field("draft_model");
  if ((*runner)->info().decoder_start >= 0 || loaded.runner->info().decoder_start >= 0)
    return invalid_argument(cat("draft_model is ", name, "; ",
                                (*runner)->info().decoder_start >= 0 ? "it" : "the model",
                                " is an encoder-decoder, which drafts are not made for: leave it out"))
        .with_field("draft_model");
  if ((*runner)->info().state_bytes > 0)
    return invalid_argument(cat("draft_model is ", name,
                                "; it keeps a state a sequence, which does not go back to where ",
                                "a draft was wrong: name another one"))
        .with_field("draft_model");
  KVASIR_TRY(same_vocabulary({model.model, loaded.runner->info().vocab_size, loaded.tokenizer.get()},
                             {name, (*runner)->info().vocab_size, text->tokenizer.get()}));
  return runner;
}

Result<std::unique_ptr<model::Runner>> load_head(const model::RunnerOptions& model, const std::string& name,
                                                 model::Runner& of) {
  model::RunnerOptions options = draft_options(model, name);
  options.max_tokens = DraftHead::step_tokens(model.max_tokens, model.max_batch);
  return of.load_head(options, DraftHead::places(model.max_tokens, model.max_batch, of.depth()));
}

// An EAGLE-3 folder.
Result<std::unique_ptr<model::Runner>> load_eagle3(const model::RunnerOptions& model, const std::string& name,
                                                   const Loaded& loaded) {
  Timed timed("draft head");
  if (loaded.runner->info().encoder || loaded.runner->info().decoder_start >= 0)
    return invalid_argument(cat("draft_model is ", name, ", an EAGLE-3 head; the model is none that one drafts for"))
        .with_field("draft_model");
  auto head = load_head(model, name, *loaded.runner);
  if (head.ok()) return head;
  return Status(head.status().code(),
                cat("draft_model is ", name, ", an EAGLE-3 head, and cannot be loaded: ", head.status().message()))
      .with_field("draft_model");
}

// The model's own layer of multi-token prediction, or null. One that cannot draft is left out: nobody has asked for it.
std::unique_ptr<model::Runner> load_next_layer(const model::RunnerOptions& model, const Loaded& loaded) {
  // A state does not go back to where a draft was wrong.
  if (loaded.runner->info().next_layers == 0 || loaded.runner->info().state_bytes > 0) return nullptr;
  Timed timed("layer of multi-token prediction");
  auto head = load_head(model, "", *loaded.runner);
  if (head.ok()) return std::move(*head);
  log_info("the model's layer of multi-token prediction is not used", {{"why", head.status().message()}});
  return nullptr;
}

}  // namespace

std::unique_ptr<Engine> Engine::start(model::RunnerOptions model, EngineOptions options) {
  model.page_size = options.page_size;
  model.index_mode = options.kv_index;
  model.max_batch = options.max_running;
  model.max_tokens = options.max_tokens_per_step;
  const bool mtp = options.mtp && options.max_draft > 0 && options.max_step_ms > 0;
  Loader loader = [model, file = options.chat_template, dates = options.template_dates, draft = options.draft_model,
                   mtp](const LoadProgress& progress) -> Result<Loaded> {
    auto report = [](void* context, const char* phase, double fraction) {
      (*static_cast<const LoadProgress*>(context))(phase, fraction);
    };
    auto reading = std::async(std::launch::async, read_text, model, file, dates);  // beside the weights
    Loaded loaded;
    {
      Timed timed("weights");
      KVASIR_ASSIGN(loaded.runner, model::load_runner(model, report, const_cast<LoadProgress*>(&progress)));
    }
    KVASIR_ASSIGN(Text text, reading.get());
    loaded.tokenizer = std::move(text.tokenizer);
    loaded.chat_template = std::move(text.chat_template);
    if (draft.empty() && mtp) {
      loaded.draft = load_next_layer(model, loaded);
    } else if (!draft.empty() && loaded.runner->info().state_bytes > 0) {
      return invalid_argument(cat("draft_model is ", draft,
                                  "; the model keeps a state a sequence, which does not go back ",
                                  "to where a draft was wrong: leave it out"))
          .with_field("draft_model");
    } else if (!draft.empty()) {
      KVASIR_ASSIGN(loaded.draft,
                    model::is_eagle3(draft) ? load_eagle3(model, draft, loaded) : load_draft(model, draft, loaded));
    }
    return loaded;
  };
  return start(std::move(loader), std::move(options));
}

}  // namespace kvasir::engine
