// HTTP/2 frame by frame, for clients that no gRPC library would let one be.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "tests/server/http_client.h"

namespace kvasir::server {

class Http2Client : public RawClient {
 public:
  enum Frame : uint8_t {
    kData = 0,
    kHeaders = 1,
    kReset = 3,
    kSettings = 4,
    kPing = 6,
    kGoAway = 7,
    kContinuation = 9
  };
  static constexpr uint8_t kEndStream = 1, kAck = 1, kEndHeaders = 4;

  using RawClient::RawClient;

  static std::string frame(uint8_t type, uint8_t flags, uint32_t stream, std::string_view payload = "") {
    std::string out = big_endian(uint32_t(payload.size()), 3);
    out += char(type);
    out += char(flags);
    out += big_endian(stream, 4);
    return out.append(payload);
  }
  static std::string preface() { return "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(kSettings, 0, 0); }
  // Literal headers, never indexed and never compressed.
  static std::string header(std::string_view name, std::string_view value) {
    std::string out(1, '\0');
    return out += length(name.size()).append(name) + length(value.size()).append(value);
  }
  static std::string call_headers(std::string_view path) {
    return header(":method", "POST") + header(":scheme", "http") + header(":path", path) +
           header(":authority", "localhost") + header("content-type", "application/grpc") + header("te", "trailers");
  }
  static std::string message(std::string_view bytes) {
    return std::string(1, '\0') + big_endian(uint32_t(bytes.size()), 4).append(bytes);
  }
  // A whole call on a stream (1, 3, 5 ...).
  static std::string call(uint32_t stream, std::string_view path, std::string_view bytes) {
    return frame(kHeaders, kEndHeaders, stream, call_headers(path)) + frame(kData, kEndStream, stream, message(bytes));
  }
  static std::string reset(uint32_t stream) { return frame(kReset, 0, stream, big_endian(8, 4)); }

  static std::string big_endian(uint32_t value, int bytes) {
    std::string out;
    for (int i = bytes; i-- > 0;) out += char(value >> (8 * i) & 255);
    return out;
  }

 private:
  static std::string length(size_t n) {
    if (n < 127) return std::string(1, char(n));
    std::string out(1, char(127));
    for (n -= 127; n >= 128; n >>= 7) out += char((n & 127) | 128);
    return out += char(n);
  }
};

}  // namespace kvasir::server
