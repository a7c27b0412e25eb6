#include "model/arch/registry.h"

#include "core/cat.h"
#include "core/log.h"
#include "model/arch/decoder.h"

namespace kvasir::model {

extern const Architecture kLlama, kMistral, kGemma3, kGemma2, kGemma, kQwen2, kQwen3, kPhi2, kPhi3, kSmolLm3, kGranite,
    kOlmo2, kOlmo3, kSeedOss, kMinistral3, kGptNeox, kGptj, kFalcon, kBloom, kMpt, kQwen2Moe, kQwen3Moe, kMixtral,
    kGptOss, kGlm4Moe, kMinimaxM2, kGemma4, kQwen3Next, kQwen35, kQwen35Moe, kBert, kXlmRoberta, kRoberta, kModernBert,
    kT5, kMt5, kDeepseekV3, kDeepseekV2, kKimiK2, kGlm4MoeLite;

namespace {

const Architecture* const kAll[] = {
    &kLlama,   &kMistral,    &kGemma3,  &kGemma2,    &kGemma,      &kQwen2,      &kQwen3,      &kPhi2,
    &kPhi3,    &kSmolLm3,    &kGranite, &kOlmo2,     &kOlmo3,      &kSeedOss,    &kMinistral3, &kGptNeox,
    &kGptj,    &kFalcon,     &kBloom,   &kMpt,       &kQwen2Moe,   &kQwen3Moe,   &kMixtral,    &kGptOss,
    &kGlm4Moe, &kMinimaxM2,  &kGemma4,  &kQwen3Next, &kQwen35,     &kQwen35Moe,  &kBert,       &kXlmRoberta,
    &kRoberta, &kModernBert, &kT5,      &kMt5,       &kDeepseekV3, &kDeepseekV2, &kKimiK2,     &kGlm4MoeLite};

template <class Name>
const Architecture* find(std::string_view name, const Name& name_of) {
  for (const Architecture* a : kAll)
    if (name_of(*a) == name) return a;
  return nullptr;
}

}  // namespace

std::span<const Architecture* const> architectures() { return kAll; }

const Architecture* find_architecture(std::string_view name) {
  return find(name, [](const Architecture& a) { return a.name; });
}

const Architecture* find_model_type(std::string_view model_type) {
  const Architecture* a = find(model_type, [](const Architecture& a) { return a.hugging_face; });
  return a ? a : find_architecture(model_type);
}

const Architecture* find_gguf_architecture(std::string_view general) {
  return find(general, [](const Architecture& a) { return a.gguf.empty() ? a.name : a.gguf; });
}

std::string known_architectures() {
  std::string out;
  for (const Architecture* a : kAll) out += (out.empty() ? "" : ", ") + std::string(a->name);
  return out;
}

Result<std::unique_ptr<Network>> load_network(const ModelConfig& config, Weights& weights, Ops& ops,
                                              const LoadProgress& progress) {
  const Architecture& a = *find_architecture(config.architecture);
  KVASIR_ASSIGN(auto network, (a.load ? a.load : load_decoder)(config, weights, ops, progress));
  std::vector<std::string> left = weights.unread();
  for (int32_t i = config.layers; i < config.layers + config.next_layers; ++i)  // a head's, if anybody's
    std::erase_if(left, [&](const std::string& name) {
      return name.find(cat("layers.", i, ".")) != std::string::npos || name.starts_with(cat("blk.", i, "."));
    });
  if (config.linear.taps > 0)  // likewise; not every config.json of the family says that there is one
    std::erase_if(left, [](const std::string& name) { return name.starts_with("mtp."); });
  if (!left.empty())
    log_warn("the model's files hold tensors that its architecture has no use for",
             {{"architecture", a.name}, {"tensors", left.size()}, {"first", left.front()}});
  return network;
}

}  // namespace kvasir::model
