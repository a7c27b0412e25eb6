// A tokenizer whose encoding ends early when its text has too many tokens, or nobody waits any longer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "model/text/text.h"

namespace kvasir::text {

struct EncodeLimits {
  size_t most_tokens = SIZE_MAX;  // with more it ends early: what comes back is longer than this, and not the whole
  size_t piece_bytes = 64 << 10;  // so much is encoded at a time where the text may be cut, which changes no token
  bool by_library = false;        // by the crate, whose ids the direct way (rust/src/direct.rs) must give
};

class BoundedTokenizer : public Tokenizer {
 public:
  // `cancelled` when nobody waits any longer (core/awaited.h), which is asked before each piece.
  virtual Result<std::vector<int32_t>> encode_within(const EncodeLimits& limits, std::string_view text, bool add_bos,
                                                     bool parse_special) const = 0;
  // Whether its vocabulary and its rules let it go the direct way, as all that are known do.
  virtual bool goes_directly() const = 0;
  Result<std::vector<int32_t>> encode(std::string_view text, bool add_bos, bool parse_special) const final {
    return encode_within({}, text, add_bos, parse_special);
  }
};

}  // namespace kvasir::text
