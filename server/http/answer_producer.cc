#include "server/http/answer_producer.h"

#include "core/cat.h"

namespace kvasir::server::http {
namespace {

std::vector<std::unique_ptr<engine::Stream>> alone(std::unique_ptr<engine::Stream> stream) {
  std::vector<std::unique_ptr<engine::Stream>> list;
  list.push_back(std::move(stream));
  return list;
}

}  // namespace

AnswerProducer::AnswerProducer(const AnswerShape& shape, bool stream, std::unique_ptr<engine::Stream> engine,
                               std::vector<std::pair<std::string, std::string>> headers, const char* streamed_as)
    : StreamsProducer(stream, alone(std::move(engine)), std::move(headers), streamed_as), reader_(shape) {}

void AnswerProducer::on(size_t, engine::Tokens& e) {
  drawn(e.tokens);
  if (AnswerReader::Out out = reader_.push(e.text); !out.empty()) piece(std::move(out));
}

void AnswerProducer::on(size_t, engine::Finished& e) {
  if (AnswerReader::Out out = reader_.finish(); !out.empty()) piece(std::move(out));
  end(e);
}

void append_event(std::string& out, std::string_view name, std::string_view data) {
  out += cat("event: ", name, "\ndata: ", data, "\n\n");
}

}  // namespace kvasir::server::http
