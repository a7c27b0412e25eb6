// One engine stream with one choice as an answer whose text is told apart: thoughts, text, calls. A protocol says how
// each part is written.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/http/answer_reader.h"
#include "server/http/streams_producer.h"

namespace kvasir::server::http {

class AnswerProducer : public StreamsProducer {
 public:
  AnswerProducer(const AnswerShape& shape, bool stream, std::unique_ptr<engine::Stream> engine,
                 std::vector<std::pair<std::string, std::string>> headers, const char* streamed_as = kEventStream);

 protected:
  // In this order: begin, pieces, end; or fail in place of what is left. Of a piece the tokens come first; what they
  // say may wait for the next.
  virtual void begin(const engine::Started& started) = 0;
  virtual void drawn(const std::vector<engine::TokenOut>&) {}
  virtual void piece(AnswerReader::Out out) = 0;
  virtual void end(const engine::Finished& finished) = 0;

  const AnswerReader& reader() const { return reader_; }

 private:
  void on(size_t, engine::Started& e) final { begin(e); }
  void on(size_t, engine::Tokens& e) final;
  void on(size_t, engine::Finished& e) final;

  AnswerReader reader_;
};

// "event: NAME\ndata: {...}\n\n"
void append_event(std::string& out, std::string_view name, std::string_view data);

}  // namespace kvasir::server::http
