// kvasir.v1 from the other side: one channel, one answer at a time, text as it comes.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "client/tls.h"
#include "core/status.h"

namespace kvasir::client {

struct ChatTarget {
  std::string address = "127.0.0.1:50051";
  std::string key;  // API key; empty: none
  TlsFiles tls;
};

struct Message {
  std::string role, content;
};

struct ChatSettings {
  std::optional<double> temperature, top_p;
  std::optional<int64_t> max_tokens;
  std::optional<uint64_t> seed;
};

struct ChatReply {
  std::string text;
  std::string reason;  // "STOP_TOKEN", "LENGTH", "CANCELLED"
  int64_t prompt_tokens = 0, completion_tokens = 0, cached_tokens = 0;
  uint64_t seed = 0;
  double first_token_seconds = 0, seconds = 0;
};

class ChatClient {
 public:
  virtual ~ChatClient() = default;
  static Result<std::unique_ptr<ChatClient>> create(const ChatTarget& target);

  // The name of what is served; waits up to `limit` for the server to answer at all.
  virtual Result<std::string> model(std::chrono::milliseconds limit) = 0;
  using OnText = std::function<void(std::string_view)>;
  virtual Result<ChatReply> chat(std::span<const Message> messages, const ChatSettings& settings,
                                 const OnText& on_text) = 0;
  virtual void cancel() = 0;  // the answer in progress, from another thread; nothing when there is none
};

}  // namespace kvasir::client
