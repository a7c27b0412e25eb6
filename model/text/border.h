// The C++ side of the C border: spans to kvt_str, kvt_buf to Status or text.
#pragma once

#include <string>
#include <string_view>

#include "core/status.h"
#include "model/text/rust/kvasir_text.h"

namespace kvasir::text {

inline kvt_str as_str(std::string_view s) { return {s.data(), s.size()}; }

class TextBuffer {
 public:
  TextBuffer() = default;
  TextBuffer(const TextBuffer&) = delete;
  TextBuffer& operator=(const TextBuffer&) = delete;
  ~TextBuffer() { kvt_buf_free(buf_); }

  kvt_buf* out() { return &buf_; }
  const uint8_t* data() const { return buf_.data; }
  size_t size() const { return buf_.size; }
  std::string_view text() const { return {reinterpret_cast<const char*>(buf_.data), buf_.size}; }
  Status error(int code) const { return {static_cast<Code>(code), std::string(text())}; }

 private:
  kvt_buf buf_{};
};

}  // namespace kvasir::text
