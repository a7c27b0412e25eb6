// Looks at the frames of an HTTP/2 connection as they come in, for the few things gRPC does not bound: a header block
// that goes on and on in CONTINUATION frames (it is kept whole, whatever the metadata limit says), streams of a client
// that never acknowledges how many it may open (the limit holds from the acknowledgement on), and streams that are
// opened only to be reset (each costs a call). And it says when a connection opens more streams than a few, and when
// one on which nobody has shown a key opens them faster than strangers may: each costs some 100 us of the threads that
// all share.
//
// An acknowledgement that comes before our settings went out says nothing: gRPC would take it for one of the settings
// of before, which know no limit.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace kvasir::server::rpc {

class FrameScanner {
 public:
  // Four times what metadata may be: room for names, padding and compression that does not compress.
  static constexpr size_t kMostHeaderBlock = 64 << 10;
  static constexpr int kMostUnacknowledged = 1000;  // clients that know no limit yet open a hundred
  static constexpr int kMostResetsASecond = 2000;   // a busy gateway's users hang up some tens of times a second
  static constexpr double kStrangersStreams = 32;   // at once, and then by the second: health is asked a few times
  static constexpr double kStrangersASecond = 128;
  static constexpr double kFew = 8;  // at once, and then two a second: what probes and their like ask
  static constexpr double kFewASecond = 2;
  static constexpr double kKnownFew = 64;  // at once, and then by the second, of somebody with a key

  // False once too much has come.
  bool take(const unsigned char* bytes, size_t n) {
    const size_t all = n;
    opened_ = 0;
    while (n > 0 && !over_ && !foreign_) {
      size_t used = preface_ < kPreface ? take_preface(bytes, n) : payload_ > 0 ? take_payload(n) : take_head(bytes, n);
      bytes += used;
      n -= used;
    }
    crowded_ = opened_ >= kManyOpened && opened_ * 1024 >= all;
    if (opened_ > 0) count_opened();
    return !over_ && !ended_.load(std::memory_order_relaxed);
  }
  // Whatever comes is too much from now on. From any thread.
  void end() { ended_.store(true, std::memory_order_relaxed); }
  // What is deciphered is handed on in parts, too.
  bool in_parts() const { return stranger() || lately_ > kKnownFew; }
  // How much to read in one go. Streams are dear, some 100 us each: where they come close together, others' turns come
  // between few of them. A large message comes in large parts.
  size_t most_at_once() const {
    return foreign_ ? kForeignPart : stranger() ? kStrangersPart : payload_ + (crowded_ ? kCrowdedPart : kKnownPart);
  }
  // How long the connection is not to be read: a stranger's that opened more streams than strangers may.
  std::chrono::microseconds rest() const {
    if (!stranger() || streams_ <= kStrangersStreams) return {};
    return std::chrono::microseconds(int64_t((streams_ - kStrangersStreams) / kStrangersASecond * 1e6) + 1);
  }
  // What was taken last opened so many streams, of somebody who has had more than a few.
  size_t many_opened() const { return lately_ > (stranger() ? kFew : kKnownFew) ? opened_ : 0; }
  // Somebody who may has called here. From any thread.
  void know() { known_.store(true, std::memory_order_relaxed); }
  bool stranger() const { return !known_.load(std::memory_order_relaxed); }
  // Something goes out to the client. A server's first bytes are its settings. From any thread.
  void sends() { sent_.store(true, std::memory_order_relaxed); }

 private:
  static constexpr size_t kPreface = 24, kHead = 9, kManyOpened = 8, kCrowdedPart = 2 << 10, kKnownPart = 6 << 10,
                          kStrangersPart = 256, kForeignPart = 16 << 10;
  enum : unsigned char { kHeaders = 1, kReset = 3, kSettings = 4, kContinuation = 9, kEndHeaders = 4, kAck = 1 };

  size_t take_preface(const unsigned char* bytes, size_t n) {
    if (preface_ == 0 && bytes[0] != 'P') foreign_ = true;  // not HTTP/2 in the clear: what it is, gRPC finds out
    size_t used = std::min(n, kPreface - preface_);
    preface_ += used;
    return used;
  }
  size_t take_payload(size_t n) {
    size_t used = std::min(n, payload_);
    payload_ -= used;
    return used;
  }
  size_t take_head(const unsigned char* bytes, size_t n) {
    size_t used = std::min(n, kHead - head_size_);
    std::copy_n(bytes, used, head_ + head_size_);
    head_size_ += used;
    if (head_size_ < kHead) return used;
    head_size_ = 0;
    payload_ = size_t(head_[0]) << 16 | size_t(head_[1]) << 8 | head_[2];
    unsigned char type = head_[3], flags = head_[4];
    if (type == kHeaders) {
      block_ = 0;
      ++opened_;
      if (!acknowledged_ && ++unacknowledged_ > kMostUnacknowledged) over_ = true;
    }
    if (type == kSettings && (flags & kAck) && sent_.load(std::memory_order_relaxed)) acknowledged_ = true;
    if (type == kReset) count_reset();
    if (type == kHeaders || type == kContinuation) {
      block_ += kHead + payload_;
      if (block_ > kMostHeaderBlock) over_ = true;
      if (flags & kEndHeaders) block_ = 0;
    }
    return used;
  }

  void count_reset() {
    auto now = std::chrono::steady_clock::now();
    if (now - second_ > std::chrono::seconds(1)) {
      second_ = now;
      resets_ = 0;
    }
    if (++resets_ > kMostResetsASecond) over_ = true;
  }

  void count_opened() {
    const auto now = std::chrono::steady_clock::now();
    const double seconds = std::chrono::duration<double>(now - counted_).count();
    streams_ = std::max(0., streams_ - kStrangersASecond * seconds) + double(opened_);
    lately_ = std::max(0., lately_ - (stranger() ? kFewASecond : kKnownFew) * seconds) + double(opened_);
    counted_ = now;
  }

  std::chrono::steady_clock::time_point second_{}, counted_{};
  double streams_ = 0, lately_ = 0;  // less those that time has allowed: as strangers may, and of which nobody minds
  int unacknowledged_ = 0, resets_ = 0;
  bool acknowledged_ = false;
  size_t preface_ = 0, head_size_ = 0, payload_ = 0, block_ = 0;
  unsigned char head_[kHead] = {};
  size_t opened_ = 0;  // in what was taken last
  bool crowded_ = false, over_ = false, foreign_ = false;
  std::atomic<bool> sent_{false}, ended_{false}, known_{false};
};

}  // namespace kvasir::server::rpc
