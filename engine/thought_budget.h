// Ends thoughts that become too long: after so many tokens only the tag that closes them can be drawn. It is a matcher
// like a grammar's, and contains the request's own grammar where it has one.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/request.h"
#include "model/text/stop_scanner.h"
#include "model/text/text.h"

namespace kvasir::engine {

class ThoughtBudget final : public text::Matcher {
 public:
  ThoughtBudget(text::TokenizerPtr tokenizer, const ThoughtLimit& limit, std::unique_ptr<text::Matcher> grammar);

  Status mask(std::span<uint32_t> bits) override;
  Status consume(int32_t token) override;
  bool finished() const override { return grammar_ && grammar_->finished(); }
  Result<std::vector<int32_t>> forced() override;
  bool indifferent() const override { return at_ == At::answer && !grammar_; }
  std::unique_ptr<text::Matcher> clone() const override;

 private:
  enum class At : uint8_t { start, thoughts, closing, answer };
  void begin();
  void follow(int32_t token);

  const text::TokenizerPtr tokenizer_;
  const ThoughtLimit limit_;
  std::unique_ptr<text::Matcher> grammar_;  // null: there is none
  At at_ = At::start;
  std::string begun_;  // at the start: what may become the tag that opens them
  text::StopScanner ends_;
  int64_t tokens_ = 0;  // of the thoughts
  size_t closed_ = 0;   // tokens of the tag that have come
};

}  // namespace kvasir::engine
