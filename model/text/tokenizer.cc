#include "model/text/tokenizer.h"

#include <algorithm>
#include <cstring>

#include "core/awaited.h"
#include "model/text/utf8.h"

namespace kvasir::text {
namespace {

std::vector<kvt_str> as_strs(const std::vector<std::string>& v) {
  std::vector<kvt_str> out;
  out.reserve(v.size());
  for (const std::string& s : v) out.push_back(as_str(s));
  return out;
}

Result<TokenizerPtr> take(int code, kvt_tokenizer* handle, const TextBuffer& error,
                          std::span<const int32_t> more_ends = {}, std::string_view config_json = {}) {
  if (code != 0) return error.error(code);
  auto made = std::make_shared<RustTokenizer>(handle);
  made->keep_config(config_json);
  for (const int32_t id : more_ends) KVASIR_TRY(made->add_end(id));
  return TokenizerPtr(std::move(made));
}

}  // namespace

Result<TokenizerPtr> Tokenizer::from_json(std::string_view tokenizer_json, std::string_view tokenizer_config_json,
                                          std::span<const int32_t> more_ends) {
  kvt_tokenizer* handle = nullptr;
  TextBuffer error;
  const int code = kvt_tokenizer_from_json(as_str(tokenizer_json), as_str(tokenizer_config_json), &handle, error.out());
  return take(code, handle, error, more_ends, tokenizer_config_json);
}

Result<TokenizerPtr> Tokenizer::from_gguf(const GgufVocab& v) {
  const std::vector<kvt_str> tokens = as_strs(v.tokens), merges = as_strs(v.merges);
  kvt_gguf_vocab c{};
  c.model = as_str(v.model);
  c.pre = as_str(v.pre);
  c.chat_template = as_str(v.chat_template);
  c.tokens = tokens.data();
  c.n_tokens = tokens.size();
  c.scores = v.scores.data();
  c.n_scores = v.scores.size();
  c.types = v.types.data();
  c.n_types = v.types.size();
  c.merges = merges.data();
  c.n_merges = merges.size();
  c.bos = v.bos;
  c.eos = v.eos;
  c.unk = v.unk;
  c.eot = v.eot;
  c.pad = v.pad;
  c.add_bos = v.add_bos;
  c.add_eos = v.add_eos;
  c.add_space_prefix = v.add_space_prefix;
  c.remove_extra_spaces = v.remove_extra_spaces;
  c.charsmap = v.charsmap.data();
  c.n_charsmap = v.charsmap.size();
  kvt_tokenizer* handle = nullptr;
  TextBuffer error;
  const int code = kvt_tokenizer_from_gguf(&c, &handle, error.out());
  return take(code, handle, error);
}

RustTokenizer::RustTokenizer(kvt_tokenizer* handle) : handle_(handle) {
  kvt_tokenizer_look(handle_, &view_);
  end_.assign(view_.end_of_generation, view_.end_of_generation + view_.n_end_of_generation);
  chat_template_.assign(view_.chat_template.data, view_.chat_template.size);
}

Status RustTokenizer::add_end(int32_t id) {
  if (!known(id))
    return invalid_argument("token " + std::to_string(id) + ", which is to end answers, is outside the vocabulary of " +
                            std::to_string(view_.vocab_size) + " tokens");
  if (std::find(end_.begin(), end_.end(), id) == end_.end()) end_.push_back(id);
  return {};
}

Result<std::vector<int32_t>> RustTokenizer::encode_within(const EncodeLimits& limits, std::string_view text,
                                                          bool add_bos, bool parse_special) const {
  auto stopped = [](void*) -> uint8_t { return !Awaited::still(); };
  const kvt_encode_limits within{limits.piece_bytes, limits.most_tokens, stopped, nullptr, limits.by_library};
  TextBuffer out;
  if (const int code = kvt_encode(handle_, as_str(text), add_bos, parse_special, &within, out.out()))
    return out.error(code);
  std::vector<int32_t> ids(out.size() / sizeof(int32_t));
  if (!ids.empty()) std::memcpy(ids.data(), out.data(), ids.size() * sizeof(int32_t));
  return ids;
}

Result<std::string> RustTokenizer::decode(std::span<const int32_t> ids, bool skip_special) const {
  std::string raw, text;
  for (const int32_t id : ids) {
    if (!known(id)) {
      return invalid_argument("token id " + std::to_string(id) + " is outside the vocabulary of " +
                              std::to_string(view_.vocab_size) + " tokens");
    }
    if (skip_special && is_special(id)) continue;
    raw += bytes(id);
  }
  std::string_view rest = raw;
  // The space that encode() put before the first word.
  if (view_.strips_leading_space && !ids.empty() && rest.starts_with(' ')) {
    const bool after_special = !skip_special && is_special(ids[0]);
    if (!after_special) rest.remove_prefix(1);
  }
  append_utf8(rest, true, text);
  return text;
}

Result<std::string> RustTokenizer::to_json() const {
  TextBuffer out;
  if (const int code = kvt_tokenizer_json(handle_, out.out())) return out.error(code);
  return std::string(reinterpret_cast<const char*>(out.data()), out.size());
}

std::string RustTokenizer::token_text(int32_t id) const {
  if (!known(id)) return {};
  return {view_.text + view_.text_offsets[id], view_.text + view_.text_offsets[id + 1]};
}

std::string_view RustTokenizer::bytes(int32_t id) const {
  if (!known(id)) return {};
  return {view_.bytes + view_.bytes_offsets[id], view_.bytes_offsets[id + 1] - view_.bytes_offsets[id]};
}

}  // namespace kvasir::text
