// An HTTP/1.1 answer read as it arrives: the head, then the body freed of its chunks.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace kvasir::client {

class HttpStream {
 public:
  // Feeds bytes; `body` is called with what they add to the body. False when they are not HTTP.
  bool feed(std::string_view bytes, const std::function<void(std::string_view)>& body);

  bool done() const { return done_; }
  bool ends_with_connection() const { return head_done_ && (last_chunk_ || (!chunked_ && length_ < 0)); }
  int status() const { return status_; }
  bool keep_alive() const { return keep_alive_; }

 private:
  bool read_head(std::string_view head);

  std::string buffer_;
  int status_ = 0;
  bool head_done_ = false, done_ = false, chunked_ = false, keep_alive_ = true, in_chunk_ = false;
  bool last_chunk_ = false;
  long long length_ = -1;  // left of the body, or of the chunk
};

// Server-sent events: calls `event` with each "data:" payload.
class EventLines {
 public:
  void feed(std::string_view bytes, const std::function<void(std::string_view)>& event);

 private:
  std::string line_;
};

}  // namespace kvasir::client
