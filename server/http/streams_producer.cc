#include "server/http/streams_producer.h"

#include <algorithm>

namespace kvasir::server::http {
namespace {

// So much is written before more events are taken: a slow reader's events stay in the engine's bounded queue.
constexpr size_t kEnough = 64 << 10;

}  // namespace

StreamsProducer::StreamsProducer(bool stream, std::vector<std::unique_ptr<engine::Stream>> streams,
                                 std::vector<std::pair<std::string, std::string>> headers, const char* streamed_as)
    : stream_(stream), engines_(std::move(streams)), open_(engines_.size(), true) {
  head_.headers = std::move(headers);
  if (!stream_) return;
  head_.content_type = streamed_as;
  head_.headers.emplace_back("Cache-Control", "no-cache");
  head_.headers.emplace_back("X-Accel-Buffering", "no");
}

Producer::Progress StreamsProducer::poll() {
  for (size_t s = 0; s < engines_.size() && !finished_; ++s)
    while (!finished_ && open_[s] && !(streaming_ && out_.size() >= kEnough)) {
      auto event = engines_[s]->poll();
      if (!event) break;
      take_event(s, *event);
    }
  if (!finished_ && std::none_of(open_.begin(), open_.end(), [](bool open) { return open; })) {
    close();
    finished_ = true;
  }
  if (finished_) return Progress::done;
  return streaming_ && !out_.empty() ? Progress::writable : Progress::waiting;
}

void StreamsProducer::take_event(size_t s, engine::Event& event) {
  if (auto* e = std::get_if<engine::Failed>(&event)) return failed(e->status);
  if (auto* e = std::get_if<engine::Finished>(&event)) {
    // By its id, from elsewhere: half an answer is none.
    if (e->reason == engine::FinishReason::cancelled && !tells_cancelled())
      return failed(Status(Code::cancelled, "the request was cancelled"));
    on(s, *e);
    if (e->last) open_[s] = false;
  } else if (auto* tokens = std::get_if<engine::Tokens>(&event)) {
    on(s, *tokens);
  } else {
    on(s, std::get<engine::Started>(event));
  }
  streaming_ = stream_;
}

// What is left of the others is given up.
void StreamsProducer::failed(const Status& status) {
  finished_ = true;
  engines_.clear();
  if (streaming_) return fail(status);
  auto headers = std::exchange(head_.headers, {});  // its id, and the pages that may read it
  head_ = refuse(status);
  head_.headers.insert(head_.headers.end(), headers.begin(), headers.end());
  out_ = std::exchange(head_.body, {});
}

void StreamsProducer::on_ready(std::function<void()> callback) {
  for (auto& engine : engines_) engine->on_ready(callback);
}

}  // namespace kvasir::server::http
