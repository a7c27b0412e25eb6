// Gemma 4's calls: call:NAME{KEY:VALUE,...}, strings between <|"|>, objects' keys bare or as strings, no quotes else.
#include <nlohmann/json.hpp>

#include "model/text/block_calls.h"

namespace kvasir::text {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kQuote = "<|\"|>", kBlanks = " \n\r\t";

// A reader of untrusted text: bounded in depth, and it says no.
class Gemma {
 public:
  explicit Gemma(std::string_view text) : text_(text) {}

  WrittenCalls call() {
    skip();
    if (!take("call:")) return std::nullopt;
    const size_t brace = text_.find('{', at_);
    if (brace == std::string_view::npos) return std::nullopt;
    const std::string_view name = text_.substr(at_, brace - at_);
    if (name.empty() || name.size() > 256 || name.find_first_of(" \n\r\t\"<>()[]:,") != std::string_view::npos)
      return std::nullopt;
    at_ = brace;
    auto arguments = object(0);
    skip();
    if (!arguments || at_ != text_.size()) return std::nullopt;
    return std::vector<WrittenCall>{
        {std::string(name), arguments->dump(-1, ' ', false, Json::error_handler_t::replace)}};
  }

 private:
  static constexpr int kMostDepth = 32;

  void skip() {
    while (at_ < text_.size() && kBlanks.find(text_[at_]) != std::string_view::npos) ++at_;
  }
  bool take(std::string_view what) {
    skip();
    if (!text_.substr(at_).starts_with(what)) return false;
    at_ += what.size();
    return true;
  }
  bool next_is(char c) {
    skip();
    return at_ < text_.size() && text_[at_] == c;
  }
  // Behind its first mark.
  std::optional<std::string> string() {
    const size_t end = text_.find(kQuote, at_);
    if (end == std::string_view::npos) return std::nullopt;
    std::string out(text_.substr(at_, end - at_));
    at_ = end + kQuote.size();
    return out;
  }
  std::optional<std::string> key() {
    if (take(kQuote)) return string();
    const size_t end = text_.find_first_of(":,{}[]", at_);
    if (end == std::string_view::npos || end == at_) return std::nullopt;
    std::string out(text_.substr(at_, end - at_));
    at_ = end;
    out.resize(out.find_last_not_of(kBlanks) + 1);
    return out;
  }
  std::optional<Json> value(int depth) {
    if (depth > kMostDepth) return std::nullopt;
    if (take(kQuote)) {
      auto text = string();
      return text ? std::optional<Json>(*std::move(text)) : std::nullopt;
    }
    if (next_is('{')) return object(depth);
    if (next_is('[')) return list(depth);
    size_t end = text_.find_first_of(",}] \n\r\t", at_);
    if (end == std::string_view::npos) end = text_.size();
    const std::string_view bare = text_.substr(at_, end - at_);
    at_ = end;
    if (bare == "true" || bare == "false") return Json(bare == "true");
    if (bare == "null" || bare == "None") return Json(nullptr);
    if (bare.find('\0') != std::string_view::npos) return std::nullopt;
    Json number = Json::parse(bare, nullptr, false);
    return number.is_number() ? std::optional<Json>(std::move(number)) : std::nullopt;
  }
  std::optional<Json> list(int depth) {
    Json out = Json::array();
    ++at_;
    while (!take("]")) {
      auto v = value(depth + 1);
      if (!v) return std::nullopt;
      out.push_back(*std::move(v));
      if (!take(",") && !next_is(']')) return std::nullopt;
    }
    return out;
  }
  std::optional<Json> object(int depth) {
    Json out = Json::object();
    ++at_;
    while (!take("}")) {
      skip();
      auto k = key();
      if (!k || !take(":")) return std::nullopt;
      auto v = value(depth + 1);
      if (!v) return std::nullopt;
      out[*k] = *std::move(v);
      if (!take(",") && !next_is('}')) return std::nullopt;
    }
    return out;
  }

  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace

WrittenCalls read_gemma_calls(std::string_view block, const TextParameters&) { return Gemma(block).call(); }

}  // namespace kvasir::text
