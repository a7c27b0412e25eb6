#include "model/text/utf8.h"

#include <cstdint>

namespace kvasir::text {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

struct Lead {
  int size;  // 0: begins no character
  uint8_t second_low, second_high;
};

Lead lead_of(uint8_t b) {
  if (b < 0x80) return {1, 0, 0};
  if (b >= 0xC2 && b <= 0xDF) return {2, 0x80, 0xBF};
  if (b == 0xE0) return {3, 0xA0, 0xBF};
  if (b == 0xED) return {3, 0x80, 0x9F};  // no surrogates
  if (b >= 0xE1 && b <= 0xEF) return {3, 0x80, 0xBF};
  if (b == 0xF0) return {4, 0x90, 0xBF};
  if (b >= 0xF1 && b <= 0xF3) return {4, 0x80, 0xBF};
  if (b == 0xF4) return {4, 0x80, 0x8F};
  return {0, 0, 0};
}

}  // namespace

size_t append_utf8(std::string_view bytes, bool last, std::string& out) {
  size_t i = 0;
  while (i < bytes.size()) {
    const Lead lead = lead_of(static_cast<uint8_t>(bytes[i]));
    if (lead.size == 1) {
      out.push_back(bytes[i++]);
      continue;
    }
    size_t n = 1;  // how many bytes fit a character that begins here
    for (; n < static_cast<size_t>(lead.size) && i + n < bytes.size(); ++n) {
      const uint8_t b = static_cast<uint8_t>(bytes[i + n]);
      if (n == 1 ? (b < lead.second_low || b > lead.second_high) : (b < 0x80 || b > 0xBF)) break;
    }
    if (n == static_cast<size_t>(lead.size)) {
      out.append(bytes.substr(i, n));
    } else if (lead.size != 0 && i + n == bytes.size() && !last) {
      return n;
    } else {
      out.append(kReplacement);
    }
    i += n;
  }
  return 0;
}

}  // namespace kvasir::text
