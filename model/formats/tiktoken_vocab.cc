#include "model/formats/tiktoken_vocab.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/cat.h"
#include "model/formats/byte_ranks.h"

namespace kvasir::model {
namespace {

using nlohmann::json;

constexpr int64_t kMostTokens = 4'000'000;
constexpr const char* kInstead = ": put the tokenizer.json there that transformers writes of it";

// Moonshot's class: runs of Han by themselves, words with their contractions, numbers of up to three digits.
constexpr const char* kMoonshotPattern =
    R"([\p{Han}]+)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr int64_t kMoonshotReserved = 256;

Result<ByteRanks> read_ranks(std::string_view text, const std::string& name) {
  ByteRanks out;
  bool bytes_there[256] = {};
  for (int64_t line = 1; !text.empty(); ++line) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view one = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (one.ends_with('\r')) one.remove_suffix(1);
    if (one.empty()) continue;
    const size_t space = one.find(' ');
    int64_t rank = -1;
    if (space != one.npos) std::from_chars(one.data() + space + 1, one.data() + one.size(), rank);
    auto bytes = from_base64(one.substr(0, space));
    if (rank != out.size() || rank >= kMostTokens || !bytes || bytes->empty() ||
        bytes->size() > ByteRanks::kLongestToken)
      return invalid_argument(cat(name, ": line ", line, " is not the token of rank ", out.size(), " (of up to ",
                                  kMostTokens, "): 1 to ", ByteRanks::kLongestToken,
                                  " bytes in base64, a space and the rank"));
    if (bytes->size() == 1) bytes_there[uint8_t(bytes->front())] = true;
    if (!out.add(*std::move(bytes)))
      return invalid_argument(cat(name, ": the token of line ", line, " stands there twice"));
  }
  if (const auto* missing = std::find(std::begin(bytes_there), std::end(bytes_there), false);
      missing != std::end(bytes_there))
    return invalid_argument(cat(name, " has no token for the byte ", missing - bytes_there));
  return out;
}

// Those that added_tokens_decoder names by their ids, and reserved ones between them.
Result<std::vector<SpecialToken>> read_special(const json& config, int64_t first, const std::string& name) {
  std::map<int64_t, SpecialToken> named;
  const json decoder = config.value("added_tokens_decoder", json::object());
  if (!decoder.is_object())
    return invalid_argument(cat(name, ": added_tokens_decoder of tokenizer_config.json must be an object"));
  for (const auto& [key, value] : decoder.items()) {
    int64_t id = -1;
    const auto read = std::from_chars(key.data(), key.data() + key.size(), id);
    if (read.ptr != key.data() + key.size() || id < first || id >= first + kMostTokens || !value.is_object() ||
        !value.value("content", json()).is_string())
      return invalid_argument(cat(name,
                                  ": added_tokens_decoder of tokenizer_config.json must be tokens (content) by ids ",
                                  "from ", first, " on; \"", key, "\" is none"));
    named[id] = {id, value["content"], value.value("special", json(true)) != json(false)};
  }
  if (!named.empty() && named.begin()->first > first + kMoonshotReserved)
    return invalid_argument(cat(name, " has ", first, " tokens, and the first that tokenizer_config.json adds is ",
                                named.begin()->first, ": the file was cut short; get it again"));
  const int64_t end = std::max(first + kMoonshotReserved, named.empty() ? 0 : named.rbegin()->first + 1);
  if (end - first > 4 * kMoonshotReserved)
    return invalid_argument(cat(name, ": added_tokens_decoder of tokenizer_config.json names the token ", end - 1,
                                "; the file has ", first, " tokens"));
  std::vector<SpecialToken> out;
  for (int64_t id = first; id < end; ++id) {
    const auto found = named.find(id);
    out.push_back(found != named.end() ? found->second : SpecialToken{id, cat("<|reserved_token_", id, "|>")});
  }
  return out;
}

}  // namespace

Result<std::string> read_tiktoken(std::string_view text, const std::string& config_json, const std::string& name) {
  const json config = json::parse(config_json, nullptr, false);
  const json kind = config.is_object() ? config.value("tokenizer_class", json()) : json();
  if (kind != "TikTokenTokenizer")
    return unimplemented(cat(name,
                             " needs a tokenizer_config.json of the class TikTokenTokenizer (Kimi K2, Moonlight); ",
                             kind.is_string() ? kind.get<std::string>() : "none", " is there", kInstead));
  KVASIR_ASSIGN(const ByteRanks ranks, read_ranks(text, name));
  KVASIR_ASSIGN(const auto special, read_special(config, ranks.size(), name));
  auto made = ranks.to_tokenizer_json(0, special, kMoonshotPattern, "");
  if (!made.ok()) return invalid_argument(cat(name, ": ", made.status().message()));
  return made;
}

}  // namespace kvasir::model
