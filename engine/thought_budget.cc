#include "engine/thought_budget.h"

#include <algorithm>

namespace kvasir::engine {

ThoughtBudget::ThoughtBudget(text::TokenizerPtr tokenizer, const ThoughtLimit& limit,
                             std::unique_ptr<text::Matcher> grammar)
    : tokenizer_(std::move(tokenizer)), limit_(limit), grammar_(std::move(grammar)), ends_(limit.ends) {
  if (limit_.begun) begin();
}

void ThoughtBudget::begin() { at_ = limit_.tokens > 0 ? At::thoughts : At::closing; }

Status ThoughtBudget::mask(std::span<uint32_t> bits) {
  if (grammar_)
    KVASIR_TRY(grammar_->mask(bits));
  else
    std::fill(bits.begin(), bits.end(), ~0u);
  if (at_ != At::closing) return {};
  const auto next = static_cast<size_t>(limit_.closing[closed_]);
  if ((bits[next / 32] >> (next % 32) & 1u) == 0) {  // the grammar has no place for thoughts, and so for no end of them
    at_ = At::answer;
    return {};
  }
  std::fill(bits.begin(), bits.end(), 0);
  bits[next / 32] = 1u << (next % 32);
  return {};
}

Status ThoughtBudget::consume(int32_t token) {
  if (at_ == At::closing && token != limit_.closing[closed_])
    return invalid_argument("the thoughts have had their tokens, and end here");
  if (grammar_) KVASIR_TRY(grammar_->consume(token));
  follow(token);
  return {};
}

void ThoughtBudget::follow(int32_t token) {
  if (at_ == At::answer) return;
  if (at_ == At::closing) {
    if (++closed_ == limit_.closing.size()) at_ = At::answer;
    return;
  }
  std::string said = tokenizer_->token_bytes(token);
  if (said.empty()) said = tokenizer_->token_text(token);  // a tag may be one special token
  if (at_ == At::start) {
    begun_ += said;
    const size_t from = begun_.find_first_not_of(" \n\r\t");
    const std::string_view rest = from == std::string::npos ? "" : std::string_view(begun_).substr(from);
    if (rest.starts_with(limit_.open))
      begin();
    else if (!std::string_view(limit_.open).starts_with(rest))
      at_ = At::answer;  // the model does not think
    return;
  }
  ++tokens_;
  size_t used = 0;
  if (ends_.scan(said, used) != nullptr)
    at_ = At::answer;
  else if (tokens_ >= limit_.tokens && ends_.may_begin() == 0)  // an end that has begun may come to its own
    at_ = At::closing;
}

Result<std::vector<int32_t>> ThoughtBudget::forced() {
  if (at_ == At::closing) return std::vector<int32_t>(limit_.closing.begin() + int64_t(closed_), limit_.closing.end());
  return grammar_ ? grammar_->forced() : std::vector<int32_t>();
}

std::unique_ptr<text::Matcher> ThoughtBudget::clone() const {
  std::unique_ptr<text::Matcher> grammar;
  if (grammar_ && !(grammar = grammar_->clone())) return nullptr;
  auto copy = std::make_unique<ThoughtBudget>(tokenizer_, limit_, std::move(grammar));
  copy->at_ = at_, copy->begun_ = begun_, copy->ends_ = ends_;
  copy->tokens_ = tokens_, copy->closed_ = closed_;
  return copy;
}

}  // namespace kvasir::engine
