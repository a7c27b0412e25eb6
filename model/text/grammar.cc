#include <charconv>
#include <mutex>

#include "model/text/recently_used.h"
#include "model/text/stoppable.h"
#include "model/text/tokenizer.h"

namespace kvasir::text {
namespace {

// Refusals apart: a client who sends only such costs nobody else's grammars. Bytes are those of the grammars as
// compiled.
constexpr size_t kCached = 64, kRefused = 256, kMostBytes = 128 << 20, kMostRefusedBytes = 8 << 20;

constexpr size_t kMostForced = 512;  // bytes of a text that must come next: more than any draft has
constexpr char kSpecial = '\xFF';    // where Rust's forced bytes name a token by its id

// The tokens of a text that others stand before: some tokenizers put a space before all they are given, so that it is
// also tried behind a line's end. Empty: not to be had.
std::vector<int32_t> tokens_within(const Tokenizer& tokenizer, std::string_view text) {
  for (const std::string_view before : {"", "\n"}) {
    auto ids = tokenizer.encode(std::string(before) + std::string(text), false, false);
    if (!ids.ok()) return {};  // it ends within a character
    size_t left = text.size(), first = ids->size();
    while (first > 0 && left > 0) {
      const std::string piece = tokenizer.token_bytes((*ids)[first - 1]);
      if (!text.substr(0, left).ends_with(piece) || piece.empty()) break;
      left -= piece.size(), --first;
    }
    if (left == 0) return {ids->begin() + int64_t(first), ids->end()};
  }
  return {};
}

class RustMatcher final : public Matcher {
 public:
  RustMatcher(kvt_matcher* handle, TokenizerPtr tokenizer) : handle_(handle), tokenizer_(std::move(tokenizer)) {}
  ~RustMatcher() override { kvt_matcher_free(handle_); }
  RustMatcher(const RustMatcher&) = delete;
  RustMatcher& operator=(const RustMatcher&) = delete;

  Status mask(std::span<uint32_t> bits) override {
    TextBuffer error;
    if (const int code = kvt_matcher_mask(handle_, bits.data(), bits.size(), error.out())) return error.error(code);
    return {};
  }
  Status consume(int32_t token) override {
    TextBuffer error;
    if (const int code = kvt_matcher_consume(handle_, token, error.out())) return error.error(code);
    return {};
  }
  bool finished() const override { return kvt_matcher_finished(handle_); }
  Result<std::vector<int32_t>> forced() override;
  std::unique_ptr<Matcher> clone() const override { return copy(); }
  std::unique_ptr<RustMatcher> copy() const {
    kvt_matcher* other = nullptr;
    TextBuffer error;
    if (kvt_matcher_clone(handle_, &other, error.out())) return nullptr;
    return std::make_unique<RustMatcher>(other, tokenizer_);
  }
  size_t bytes() const { return kvt_matcher_bytes(handle_); }

 private:
  kvt_matcher* handle_;
  TokenizerPtr tokenizer_;
};

Result<std::vector<int32_t>> RustMatcher::forced() {
  TextBuffer bytes, error;
  if (const int code = kvt_matcher_forced(handle_, bytes.out(), error.out())) return error.error(code);
  std::vector<int32_t> out;
  for (std::string_view left = bytes.text(); !left.empty();) {
    if (left[0] == kSpecial) {
      const size_t end = left.find(']');
      int32_t id = -1;
      if (end == std::string_view::npos || left.size() < 3 ||
          std::from_chars(left.data() + 2, left.data() + end, id).ptr != left.data() + end)
        break;
      out.push_back(id);
      left.remove_prefix(end + 1);
      continue;
    }
    std::string_view text = left.substr(0, left.find(kSpecial));
    if (text.size() > kMostForced) {
      text = text.substr(0, kMostForced);
      while (!text.empty() && (left[text.size()] & 0xC0) == 0x80) text.remove_suffix(1);
      left = text;
    }
    const std::vector<int32_t> tokens = tokens_within(*tokenizer_, text);
    if (tokens.empty()) break;
    out.insert(out.end(), tokens.begin(), tokens.end());
    left.remove_prefix(text.size());
  }
  return out;
}

// One text that names the grammar: kind, then each part with its length before it.
std::string key_of(const GrammarSpec& spec) {
  std::string key(1, static_cast<char>('0' + static_cast<int>(spec.kind)));
  auto add = [&key](const std::string& s) { key += std::to_string(s.size()) + ':' + s; };
  if (spec.kind == GrammarSpec::Kind::choice) {
    for (const std::string& choice : spec.choices) add(choice);
  } else if (spec.kind != GrammarSpec::Kind::json_object) {
    add(spec.text);
  }
  return key;
}

class RustCompiler final : public StoppableCompiler {
 public:
  RustCompiler(TokenizerPtr tokenizer, kvt_grammar* handle) : tokenizer_(std::move(tokenizer)), handle_(handle) {}
  ~RustCompiler() override { kvt_grammar_free(handle_); }
  RustCompiler(const RustCompiler&) = delete;
  RustCompiler& operator=(const RustCompiler&) = delete;

  Result<std::unique_ptr<Matcher>> compile_unless(const Stopped& stopped, const GrammarSpec& spec) override {
    if (spec.kind == GrammarSpec::Kind::none) return invalid_argument("no grammar is given");
    const std::string key = key_of(spec);
    {
      std::lock_guard lock(mutex_);
      if (auto* known = compiled_.find(key)) return copy_of(**known);
      if (const Status* known = refused_.find(key)) return *known;
    }
    std::vector<kvt_str> choices;
    for (const std::string& choice : spec.choices) choices.push_back(as_str(choice));
    kvt_matcher* made = nullptr;
    TextBuffer error;
    const auto asked = [](void* of) -> uint8_t { return (*static_cast<const Stopped*>(of))(); };
    if (const int code =
            kvt_grammar_compile(handle_, static_cast<int>(spec.kind), as_str(spec.text), choices.data(), choices.size(),
                                stopped ? +asked : nullptr, const_cast<Stopped*>(&stopped), &made, error.out())) {
      Status refusal = error.error(code).with_field(spec.kind == GrammarSpec::Kind::tool_calls ? "tools" : "grammar");
      std::lock_guard lock(mutex_);
      if (refusal.code() == Code::invalid_argument || refusal.code() == Code::failed_precondition)
        refused_.keep(key, refusal);  // what it says of this grammar stays true
      return refusal;
    }
    auto prototype = std::make_unique<RustMatcher>(made, tokenizer_);
    auto first = copy_of(*prototype);
    const size_t bytes = prototype->bytes();
    std::lock_guard lock(mutex_);
    compiled_.keep(key, std::move(prototype), bytes);
    return first;
  }

 private:
  static Result<std::unique_ptr<Matcher>> copy_of(const RustMatcher& prototype) {
    std::unique_ptr<Matcher> copy = prototype.copy();
    if (!copy) return resource_exhausted("the grammars in use have taken all memory that is theirs; try again later");
    return copy;
  }

  TokenizerPtr tokenizer_;
  kvt_grammar* handle_;
  std::mutex mutex_;  // guards what follows, and the prototypes while they are copied
  RecentlyUsed<std::unique_ptr<RustMatcher>> compiled_{kCached, kMostBytes};
  RecentlyUsed<Status> refused_{kRefused, kMostRefusedBytes};
};

}  // namespace

Result<std::shared_ptr<GrammarCompiler>> GrammarCompiler::create(TokenizerPtr tokenizer) {
  const auto* rust = dynamic_cast<const RustTokenizer*>(tokenizer.get());
  if (!rust) return invalid_argument("grammars need a tokenizer made by Tokenizer::from_gguf or from_json");
  kvt_grammar* handle = nullptr;
  TextBuffer error;
  if (const int code = kvt_grammar_new(rust->handle(), &handle, error.out())) return error.error(code);
  return std::shared_ptr<GrammarCompiler>(std::make_shared<RustCompiler>(std::move(tokenizer), handle));
}

}  // namespace kvasir::text
