// A byte-level vocabulary that is nothing but its tokens' bytes in the order in which they are merged, as tekken.json
// and tiktoken's files have it, and the tokenizer.json that says the same.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/status.h"

namespace kvasir::model {

std::optional<std::string> from_base64(std::string_view text);

struct SpecialToken {
  int64_t id = 0;
  std::string text;
  bool special = true;  // left out of texts where special tokens are
};

class ByteRanks {
 public:
  static constexpr size_t kLongestToken = 512;

  int64_t size() const { return int64_t(tokens_.size()); }
  bool add(std::string bytes);  // false: it is there already
  // Words are cut off a text by `pattern`, and merged from bytes unless they are tokens as they stand; merges are all
  // ways to make a token of two others, in the order of the tokens they make. The token of rank 0 has the id `first`.
  // `begin`: the special token that every text begins with; empty: none.
  Result<std::string> to_tokenizer_json(int64_t first, std::span<const SpecialToken> special,
                                        const std::string& pattern, const std::string& begin) const;

 private:
  nlohmann::json merges() const;

  std::vector<std::string> tokens_;
  std::unordered_map<std::string, int64_t> ranks_;
};

}  // namespace kvasir::model
