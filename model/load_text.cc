#include "model/load.h"
#include "model/runner.h"

namespace kvasir::model {

Result<ModelText> load_text(const RunnerOptions& options) {
  KVASIR_ASSIGN(TextAssets assets, load_text_assets(options.model));
  ModelText out;
  if (assets.vocab) {
    KVASIR_ASSIGN(out.tokenizer, text::Tokenizer::from_gguf(*assets.vocab));
  } else if (!assets.tokenizer_json.empty()) {
    KVASIR_ASSIGN(out.tokenizer, text::Tokenizer::from_json(assets.tokenizer_json, assets.tokenizer_config_json,
                                                            assets.end_of_generation));
  }
  if (out.tokenizer && assets.chat_template.empty()) assets.chat_template = out.tokenizer->chat_template();
  if (out.tokenizer && !assets.chat_template.empty()) {
    KVASIR_ASSIGN(out.chat_template, text::ChatTemplate::compile(assets.chat_template, *out.tokenizer));
  }
  return out;
}

}  // namespace kvasir::model
