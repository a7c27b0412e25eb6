#include "server/http/answer_producer.h"

#include "core/cat.h"

namespace kvasir::server::http {
namespace {

// So much is written before more events are taken: a slow reader's events stay in the engine's bounded queue.
constexpr size_t kEnough = 64 << 10;

}  // namespace

AnswerProducer::AnswerProducer(const AnswerShape& shape, bool stream, std::unique_ptr<engine::Stream> engine,
                               std::vector<std::pair<std::string, std::string>> headers)
    : stream_(stream), reader_(shape), engine_(std::move(engine)) {
  head_.headers = std::move(headers);
  if (!stream_) return;
  head_.content_type = "text/event-stream; charset=utf-8";
  head_.headers.emplace_back("Cache-Control", "no-cache");
  head_.headers.emplace_back("X-Accel-Buffering", "no");
}

Producer::Progress AnswerProducer::poll() {
  while (!finished_ && !(streaming_ && out_.size() >= kEnough)) {
    auto event = engine_->poll();
    if (!event) break;
    std::visit([&](auto& e) { on(e); }, *event);
    if (!std::holds_alternative<engine::Failed>(*event)) streaming_ = stream_;
  }
  if (finished_) return Progress::done;
  return streaming_ && !out_.empty() ? Progress::writable : Progress::waiting;
}

void AnswerProducer::on(engine::Tokens& e) {
  if (AnswerReader::Out out = reader_.push(e.text); !out.empty()) piece(std::move(out));
}

void AnswerProducer::on(engine::Finished& e) {
  if (e.reason == engine::FinishReason::cancelled) {  // by its id, from elsewhere: half an answer is none
    engine::Failed failed{Status(Code::cancelled, "the request was cancelled")};
    return on(failed);
  }
  if (AnswerReader::Out out = reader_.finish(); !out.empty()) piece(std::move(out));
  end(e);
  finished_ = true;
}

void AnswerProducer::on(engine::Failed& e) {
  finished_ = true;
  if (streaming_) return fail(e.status);
  auto headers = std::exchange(head_.headers, {});  // its id, and the pages that may read it
  head_ = refuse(e.status);
  head_.headers.insert(head_.headers.end(), headers.begin(), headers.end());
  out_ = std::exchange(head_.body, {});
}

void append_event(std::string& out, std::string_view name, std::string_view data) {
  out += cat("event: ", name, "\ndata: ", data, "\n\n");
}

}  // namespace kvasir::server::http
