#include "client/http_stream.h"

#include <algorithm>
#include <charconv>

namespace kvasir::client {
namespace {

constexpr size_t kMaxHead = 64 << 10;

bool same_word(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](char x, char y) { return (x | 32) == (y | 32); });
}

std::string_view trimmed(std::string_view s) {
  while (!s.empty() && (s.front() == ' ' || s.front() == '\t')) s.remove_prefix(1);
  while (!s.empty() && (s.back() == ' ' || s.back() == '\r' || s.back() == '\t')) s.remove_suffix(1);
  return s;
}

}  // namespace

bool HttpStream::read_head(std::string_view head) {
  if (!head.starts_with("HTTP/1.") || head.size() < 12) return false;
  if (std::from_chars(head.data() + 9, head.data() + 12, status_).ec != std::errc()) return false;
  keep_alive_ = head[7] == '1';
  size_t at = head.find("\r\n");
  while (at != std::string_view::npos && at + 2 < head.size()) {
    const size_t end = std::min(head.find("\r\n", at + 2), head.size());
    const std::string_view line = head.substr(at + 2, end - at - 2);
    const size_t colon = line.find(':');
    if (colon != std::string_view::npos) {
      const std::string_view name = line.substr(0, colon), value = trimmed(line.substr(colon + 1));
      if (same_word(name, "content-length")) {
        if (std::from_chars(value.data(), value.data() + value.size(), length_).ec != std::errc() || length_ < 0) {
          return false;
        }
      } else if (same_word(name, "transfer-encoding")) {
        chunked_ = same_word(value, "chunked");
      } else if (same_word(name, "connection")) {
        keep_alive_ = !same_word(value, "close");
      }
    }
    at = end == head.size() ? std::string_view::npos : end;
  }
  if (chunked_) length_ = -1;
  return true;
}

bool HttpStream::feed(std::string_view bytes, const std::function<void(std::string_view)>& body) {
  buffer_ += bytes;
  if (!head_done_) {
    const size_t end = buffer_.find("\r\n\r\n");
    if (end == std::string::npos) return buffer_.size() < kMaxHead;
    if (!read_head(std::string_view(buffer_).substr(0, end))) return false;
    buffer_.erase(0, end + 4);
    if (status_ == 100) return feed({}, body);
    head_done_ = true;
    done_ = !chunked_ && length_ == 0;
  }
  size_t used = 0;
  const auto rest = [&] { return std::string_view(buffer_).substr(used); };
  while (!done_ && used < buffer_.size()) {
    if (!chunked_) {
      const size_t n = length_ < 0 ? rest().size() : std::min<size_t>(rest().size(), length_);
      body(rest().substr(0, n));
      used += n;
      if (length_ >= 0 && (length_ -= static_cast<long long>(n)) == 0) done_ = true;
    } else if (in_chunk_) {
      const size_t n = std::min<size_t>(rest().size(), length_);
      body(rest().substr(0, n));
      used += n;
      if ((length_ -= static_cast<long long>(n)) == 0) in_chunk_ = false;
    } else {
      // A size line; the line end of the chunk before is an empty one in front of it. After the last chunk come
      // trailers, which say nothing here, and an empty line: what is left of it would be taken for the next answer.
      const size_t end = rest().find("\r\n");
      if (end == std::string_view::npos) break;
      const std::string_view line = trimmed(rest().substr(0, end));
      used += end + 2;
      done_ = last_chunk_ && line.empty();
      if (last_chunk_ || line.empty()) continue;
      unsigned long long size = 0;
      if (std::from_chars(line.data(), line.data() + line.size(), size, 16).ec != std::errc()) return false;
      length_ = static_cast<long long>(size);
      in_chunk_ = size > 0;
      last_chunk_ = size == 0;
    }
  }
  buffer_.erase(0, used);
  return true;
}

void EventLines::feed(std::string_view bytes, const std::function<void(std::string_view)>& event) {
  for (;;) {
    const size_t end = bytes.find('\n');
    if (end == std::string_view::npos) break;
    line_ += bytes.substr(0, end);
    bytes.remove_prefix(end + 1);
    std::string_view line = trimmed(line_);
    if (line.starts_with("data:")) event(trimmed(line.substr(5)));
    line_.clear();
  }
  line_ += bytes;
}

}  // namespace kvasir::client
