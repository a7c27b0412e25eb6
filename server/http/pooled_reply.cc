#include "server/http/pooled_reply.h"

#include <bit>
#include <charconv>
#include <utility>

namespace kvasir::server::http {
namespace {

class PooledReply final : public Producer {
 public:
  PooledReply(std::unique_ptr<engine::Stream> stream, std::function<std::string(const engine::Finished&)> write,
              std::vector<std::pair<std::string, std::string>> headers, HttpResponse (*refuse)(const Status&))
      : stream_(std::move(stream)), write_(std::move(write)), refuse_(refuse) {
    head_.headers = std::move(headers);
  }

  Progress poll() override {
    while (!finished_) {
      auto event = stream_->poll();
      if (!event) return Progress::waiting;
      if (auto* all = std::get_if<engine::Finished>(&*event)) {
        out_ = write_(*all);
        finished_ = true;
      } else if (auto* failed = std::get_if<engine::Failed>(&*event)) {
        auto headers = std::exchange(head_.headers, {});
        head_ = refuse_(failed->status);
        head_.headers.insert(head_.headers.end(), headers.begin(), headers.end());
        out_ = std::exchange(head_.body, {});
        finished_ = true;
      }
    }
    return Progress::done;
  }
  const HttpResponse& head() const override { return head_; }
  bool streams() const override { return false; }
  std::string take() override { return std::exchange(out_, {}); }
  void on_ready(std::function<void()> callback) override { stream_->on_ready(std::move(callback)); }

 private:
  std::unique_ptr<engine::Stream> stream_;
  const std::function<std::string(const engine::Finished&)> write_;
  HttpResponse (*const refuse_)(const Status&);
  HttpResponse head_;
  std::string out_;
  bool finished_ = false;
};

}  // namespace

std::unique_ptr<Producer> pooled_reply(std::unique_ptr<engine::Stream> stream,
                                       std::function<std::string(const engine::Finished&)> write,
                                       std::vector<std::pair<std::string, std::string>> headers,
                                       HttpResponse (*refuse)(const Status&)) {
  return std::make_unique<PooledReply>(std::move(stream), std::move(write), std::move(headers), refuse);
}

void append_vector(std::string& out, const std::vector<float>& values) {
  char text[32];
  out += '[';
  for (size_t i = 0; i < values.size(); ++i) {
    if (i > 0) out += ',';
    out.append(text, std::to_chars(text, text + sizeof text, values[i]).ptr);
  }
  out += ']';
}

void append_base64(std::string& out, const std::vector<float>& values) {
  static constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  uint32_t bits = 0;  // of up to three bytes
  int bytes = 0;
  auto digits = [&](int n) {
    for (int i = 0; i < 4; ++i) out += i < n ? kDigits[bits >> (18 - 6 * i) & 63] : '=';
    bits = 0, bytes = 0;
  };
  for (float value : values)
    for (int b = 0; b < 4; ++b) {
      bits |= (std::bit_cast<uint32_t>(value) >> (8 * b) & 255) << (16 - 8 * bytes);
      if (++bytes == 3) digits(4);
    }
  if (bytes > 0) digits(bytes + 1);
}

}  // namespace kvasir::server::http
