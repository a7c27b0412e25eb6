#include "model/formats/byte_ranks.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "core/cat.h"

namespace kvasir::model {
namespace {

using nlohmann::json;

// The characters that stand for bytes in byte-level vocabularies.
std::array<std::string, 256> byte_letters() {
  std::array<std::string, 256> out;
  uint32_t spare = 256;
  for (uint32_t b = 0; b < 256; ++b) {
    const bool plain = (b > 32 && b < 127) || (b > 160 && b != 173);
    const uint32_t c = plain ? b : spare++;
    out[b] = c < 128 ? std::string(1, char(c)) : std::string{char(0xc0 | c >> 6), char(0x80 | (c & 63))};
  }
  return out;
}

std::string letters(std::string_view bytes) {
  static const auto kLetters = byte_letters();
  std::string out;
  for (const char c : bytes) out += kLetters[uint8_t(c)];
  return out;
}

// Each text by itself, behind the token that begins it.
json begins_with(const std::string& token, int64_t id) {
  const json text = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}, more = {{"Sequence", {{"id", "B"}, {"type_id", 0}}}},
             begin = {{"SpecialToken", {{"id", token}, {"type_id", 0}}}};
  return {{"type", "TemplateProcessing"},
          {"single", json::array({begin, text})},
          {"pair", json::array({begin, text, begin, more})},
          {"special_tokens", {{token, {{"id", token}, {"ids", {id}}, {"tokens", {token}}}}}}};
}

}  // namespace

std::optional<std::string> from_base64(std::string_view text) {
  constexpr std::string_view kLetters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  uint32_t bits = 0;
  int have = 0;
  for (const char c : text.substr(0, text.find('='))) {
    const size_t value = kLetters.find(c);
    if (value == std::string_view::npos) return std::nullopt;
    bits = bits << 6 | uint32_t(value), have += 6;
    if (have < 8) continue;
    have -= 8;
    out += char(bits >> have & 255);
  }
  return out;
}

bool ByteRanks::add(std::string bytes) {
  if (!ranks_.emplace(bytes, size()).second) return false;
  tokens_.push_back(std::move(bytes));
  return true;
}

json ByteRanks::merges() const {
  json out = json::array();
  std::vector<std::pair<int64_t, int64_t>> ways;
  for (const std::string& token : tokens_) {
    ways.clear();
    for (size_t at = 1; at < token.size(); ++at) {
      const auto left = ranks_.find(token.substr(0, at)), right = ranks_.find(token.substr(at));
      if (left != ranks_.end() && right != ranks_.end()) ways.emplace_back(left->second, right->second);
    }
    std::sort(ways.begin(), ways.end());
    for (const auto& [left, right] : ways)
      out.push_back({letters(tokens_[size_t(left)]), letters(tokens_[size_t(right)])});
  }
  return out;
}

Result<std::string> ByteRanks::to_tokenizer_json(int64_t first, std::span<const SpecialToken> special,
                                                 const std::string& pattern, const std::string& begin) const {
  json vocab = json::object(), added = json::array(), processor;
  for (const SpecialToken& t : special) {
    if (!vocab.emplace(t.text, t.id).second)
      return invalid_argument(cat("the special token of rank ", t.id, " stands there twice"));
    added.push_back({{"id", t.id},
                     {"content", t.text},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", t.special}});
    if (!begin.empty() && t.text == begin) processor = begins_with(begin, t.id);
  }
  for (int64_t i = 0; i < size(); ++i)
    if (!vocab.emplace(letters(tokens_[size_t(i)]), i + first).second)
      return invalid_argument(cat("the token of rank ", i, " is the text of a special token"));
  const json bytes = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", false}};
  const json split = {
      {"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}, {"invert", false}};
  const json out = {
      {"version", "1.0"},
      {"added_tokens", added},
      {"normalizer", nullptr},
      {"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", json::array({split, bytes})}}},
      {"post_processor", processor},
      {"decoder", bytes},
      {"model", {{"type", "BPE"}, {"ignore_merges", true}, {"vocab", std::move(vocab)}, {"merges", merges()}}}};
  return out.dump();
}

}  // namespace kvasir::model
