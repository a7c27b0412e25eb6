#include "model/formats/mistral_vocab.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "core/cat.h"
#include "model/formats/byte_ranks.h"

namespace kvasir::model {
namespace {

using nlohmann::json;

constexpr int64_t kMostTokens = 4'000'000;

// Of files without a list of their own (up to version 7), in the order of their ids.
constexpr const char* kSpecial[] = {"<unk>",
                                    "<s>",
                                    "</s>",
                                    "[INST]",
                                    "[/INST]",
                                    "[AVAILABLE_TOOLS]",
                                    "[/AVAILABLE_TOOLS]",
                                    "[TOOL_RESULTS]",
                                    "[/TOOL_RESULTS]",
                                    "[TOOL_CALLS]",
                                    "[IMG]",
                                    "<pad>",
                                    "[IMG_BREAK]",
                                    "[IMG_END]",
                                    "[PREFIX]",
                                    "[MIDDLE]",
                                    "[SUFFIX]",
                                    "[SYSTEM_PROMPT]",
                                    "[/SYSTEM_PROMPT]",
                                    "[TOOL_CONTENT]"};

class TekkenReader {
 public:
  TekkenReader(const json& root, const std::string& name) : root_(root), name_(name) {}

  Result<Tekken> read() {
    KVASIR_TRY(read_config());
    KVASIR_TRY(read_special());
    KVASIR_TRY(read_tokens());
    auto made = ranks_.to_tokenizer_json(reserved_, special_, pattern_, "<s>");
    if (!made.ok()) return bad(made.status().message());
    const bool thinks = is_special("[THINK]") && is_special("[/THINK]");
    return Tekken{*std::move(made), version_, thinks};
  }

 private:
  Status bad(const std::string& what) const { return invalid_argument(cat(name_, ": ", what)); }
  Status count(const json& in, const char* key, int64_t* out) const {
    const auto it = in.find(key);
    if (it == in.end() || !it->is_number_unsigned() || it->get<uint64_t>() > uint64_t(kMostTokens))
      return bad(cat(key, " must be a whole number of at most ", kMostTokens));
    *out = it->get<int64_t>();
    return {};
  }

  Status read_config() {
    const auto config = root_.find("config");
    if (config == root_.end() || !config->is_object()) return bad("config must be an object");
    const auto pattern = config->find("pattern");
    if (pattern == config->end() || !pattern->is_string()) return bad("config.pattern must be a text");
    pattern_ = *pattern;
    if (const json version = config->value("version", json()); version.is_string())
      version_ = version_number(version.get_ref<const std::string&>());
    int64_t all = 0;
    KVASIR_TRY(count(*config, "default_vocab_size", &all));
    KVASIR_TRY(count(*config, "default_num_special_tokens", &reserved_));
    if (all < reserved_ + 256)
      return bad(
          cat("default_vocab_size is ", all, "; there are ", reserved_, " special tokens and 256 bytes at least"));
    count_ = all - reserved_;
    return {};
  }

  Status read_special() {
    std::vector<std::string> names;
    if (const auto listed = root_.find("special_tokens"); listed != root_.end() && !listed->is_null()) {
      if (!listed->is_array()) return bad("special_tokens must be a list");
      for (const json& one : *listed) {
        if (!one.is_object() || !one.value("token_str", json()).is_string() ||
            one.value("rank", json()) != names.size())
          return bad(cat("special_tokens must be texts (token_str) by rank; that of rank ", names.size(), " is not"));
        names.push_back(one["token_str"]);
      }
    } else {
      names.assign(std::begin(kSpecial), std::end(kSpecial));
    }
    if (int64_t(names.size()) > reserved_)
      return bad(cat("it has ", names.size(), " special tokens; default_num_special_tokens is ", reserved_));
    while (int64_t(names.size()) < reserved_) names.push_back(cat("<SPECIAL_", names.size(), ">"));
    for (size_t i = 0; i < names.size(); ++i) special_.push_back({int64_t(i), std::move(names[i])});
    return is_special("<s>") ? Status() : bad("it has no token <s>");
  }

  Status read_tokens() {
    const auto listed = root_.find("vocab");
    if (listed == root_.end() || !listed->is_array() || int64_t(listed->size()) < count_)
      return bad(cat("vocab must be a list of at least ", count_, " tokens"));
    for (int64_t i = 0; i < count_; ++i) {
      const json& one = (*listed)[size_t(i)];
      if (!one.is_object() || one.value("rank", json()) != i || !one.value("token_bytes", json()).is_string())
        return bad(cat("vocab must be tokens (token_bytes) by rank; that of rank ", i, " is not"));
      auto bytes = from_base64(one["token_bytes"].get_ref<const std::string&>());
      if (!bytes || bytes->empty() || bytes->size() > ByteRanks::kLongestToken || (i < 256 && bytes->size() != 1))
        return bad(cat("token_bytes of rank ", i, " is no base64 of 1 to ", ByteRanks::kLongestToken,
                       " bytes (one of the first 256)"));
      if (!ranks_.add(*std::move(bytes))) return bad(cat("the token of rank ", i, " stands there twice"));
    }
    return {};
  }
  bool is_special(std::string_view text) const {
    return std::any_of(special_.begin(), special_.end(), [&](const SpecialToken& t) { return t.text == text; });
  }

  const json& root_;
  const std::string& name_;
  std::string pattern_;
  int version_ = 0;
  int64_t reserved_ = 0, count_ = 0;
  std::vector<SpecialToken> special_;
  ByteRanks ranks_;
};

// Fields of a protocol buffer, one after another. Ends at the first that is not whole.
class ProtoFields {
 public:
  explicit ProtoFields(std::string_view bytes) : left_(bytes) {}
  bool next() {
    if (left_.empty()) return false;
    const auto tag = varint();
    if (!tag) return fail();
    field = int(*tag >> 3 & 0xffff), kind = int(*tag & 7), number = 0, text = {};
    if (kind == 0) {
      const auto v = varint();
      if (!v) return fail();
      number = *v;
      return true;
    }
    size_t size = kind == 1 ? 8 : kind == 5 ? 4 : left_.size() + 1;
    if (kind == 2) {
      const auto v = varint();
      if (!v) return fail();
      size = size_t(*v);
    }
    if (size > left_.size()) return fail();
    text = left_.substr(0, size);
    left_.remove_prefix(size);
    return true;
  }
  bool whole() const { return !broken_; }

  int field = 0, kind = 0;
  uint64_t number = 0;
  std::string_view text;

 private:
  bool fail() {
    broken_ = true;
    return false;
  }
  std::optional<uint64_t> varint() {
    uint64_t out = 0;
    for (int shift = 0; shift < 64 && !left_.empty(); shift += 7) {
      const auto byte = uint8_t(left_.front());
      left_.remove_prefix(1);
      out |= uint64_t(byte & 127) << shift;
      if (byte < 128) return out;
    }
    return std::nullopt;
  }

  std::string_view left_;
  bool broken_ = false;
};

}  // namespace

int version_number(std::string_view version) {
  int out = 0;
  if (version.starts_with('v')) std::from_chars(version.data() + 1, version.data() + version.size(), out);
  return out > 0 && out < 1000 ? out : 0;
}

Result<Tekken> read_tekken(std::string_view text, const std::string& name) {
  const json root = json::parse(text, nullptr, false);
  if (!root.is_object()) return invalid_argument(cat(name, " is not a JSON object"));
  return TekkenReader(root, name).read();
}

Result<text::GgufVocab> vocab_from_sentencepiece(std::string_view bytes, const std::string& name) {
  text::GgufVocab v;
  v.model = "llama";
  v.unk = 0, v.bos = 1, v.eos = 2, v.add_bos = true;
  uint64_t kind = 1;  // unigram, where it does not say
  bool trims = true, suffixes = false, escapes = true;
  ProtoFields model(bytes);
  bool whole = true;
  while (model.next()) {
    if (model.kind != 2) continue;
    ProtoFields in(model.text);
    if (model.field == 1) {  // a piece
      std::string piece;
      float score = 0;
      int32_t type = 1;
      while (in.next()) {
        if (in.field == 1 && in.kind == 2) piece = in.text;
        if (in.field == 2 && in.kind == 5) std::memcpy(&score, in.text.data(), 4);
        if (in.field == 3 && in.kind == 0) type = int32_t(std::min<uint64_t>(in.number, 7));
      }
      if (type < 1 || type > 6)
        return invalid_argument(cat(name, ": the piece ", v.tokens.size(), " is of a kind that is not known"));
      v.tokens.push_back(std::move(piece)), v.scores.push_back(score), v.types.push_back(type);
    } else if (model.field == 2) {  // how it was trained
      while (in.next()) {
        if (in.kind != 0) continue;
        if (in.field == 3) kind = in.number;
        if (in.field == 24) suffixes = in.number != 0;
        for (const auto& [field, id] : {std::pair{40, &v.unk}, {41, &v.bos}, {42, &v.eos}, {43, &v.pad}})
          if (in.field == field) *id = int32_t(uint32_t(in.number));
      }
    } else if (model.field == 3) {  // what texts become first
      while (in.next()) {
        if (in.field == 2 && in.kind == 2) v.charsmap.assign(in.text.begin(), in.text.end());
        if (in.field == 3 && in.kind == 0) v.add_space_prefix = in.number != 0;
        if (in.field == 4 && in.kind == 0) trims = in.number != 0;
        if (in.field == 5 && in.kind == 0) escapes = in.number != 0;
      }
    }
    whole &= in.whole();
  }
  constexpr const char* kInstead = ": put the tokenizer.json there that transformers writes of it";
  if (!model.whole() || !whole || v.tokens.empty())
    return invalid_argument(cat(name, " is no SentencePiece model, or not all of one"));
  if (kind != 1 && kind != 2)
    return unimplemented(
        cat(name, " is a SentencePiece model of words or characters; BPE and unigrams are supported", kInstead));
  if (kind == 2 && (!v.charsmap.empty() || trims))
    return unimplemented(cat(name, " changes texts (", trims ? "spaces that it removes" : "a map of characters",
                             "), which is not supported in SentencePiece models of BPE", kInstead));
  if (suffixes || !escapes)
    return unimplemented(cat(name, suffixes ? " has the mark of a space behind words" : " does not mark spaces",
                             ", which is not supported in SentencePiece models", kInstead));
  if (kind == 1) {
    // Those stand before a text is changed, and in the middle of it.
    if (std::find(v.types.begin(), v.types.end(), 4) != v.types.end())
      return unimplemented(cat(
          name, " has pieces of its user's, which are not supported in SentencePiece models of unigrams", kInstead));
    v.model = "sentencepiece";
    v.remove_extra_spaces = trims;
    // T5's and its like end a text instead of beginning it.
    v.add_bos = v.bos >= 0, v.add_eos = v.bos < 0 && v.eos >= 0;
  }
  for (int32_t* id : {&v.unk, &v.bos, &v.eos, &v.pad})
    if (*id >= int32_t(v.tokens.size()) || *id < -1)
      return invalid_argument(cat(name, " names the token ", *id, " of ", v.tokens.size()));
  return v;
}

}  // namespace kvasir::model
