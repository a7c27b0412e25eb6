// UTF-8 that arrives in pieces.
#pragma once

#include <string>
#include <string_view>

namespace kvasir::text {

// Appends to `out` the characters of `bytes`, each ill-formed sequence as one U+FFFD (the longest prefix of
// a character counts as one, as Unicode advises). Returns how many bytes at the end may still become a
// character; with `last` they cannot, and become U+FFFD too.
size_t append_utf8(std::string_view bytes, bool last, std::string& out);

}  // namespace kvasir::text
