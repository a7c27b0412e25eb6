// One engine stream as an answer that is streamed or whole, for protocols with one choice: polling, what failed before
// and after the first byte, and the answer's text told apart. A protocol says how each part is written.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/request.h"
#include "server/http/answer_reader.h"
#include "server/http/http.h"

namespace kvasir::server::http {

class AnswerProducer : public Producer {
 public:
  AnswerProducer(const AnswerShape& shape, bool stream, std::unique_ptr<engine::Stream> engine,
                 std::vector<std::pair<std::string, std::string>> headers);

  Progress poll() override;
  const Response& head() const override { return head_; }
  bool streams() const override { return streaming_; }
  std::string take() override { return std::exchange(out_, {}); }
  void on_ready(std::function<void()> callback) override { engine_->on_ready(std::move(callback)); }

 protected:
  // In this order: begin, pieces, end; or fail in place of what is left. Streamed or not, they append to out_ what is
  // to be sent; of a whole answer that is its body, at the end.
  virtual void begin(const engine::Started& started) = 0;
  virtual void piece(AnswerReader::Out out) = 0;
  virtual void end(const engine::Finished& finished) = 0;
  virtual void fail(const Status& status) = 0;              // a stream's last event
  virtual Response refuse(const Status& status) const = 0;  // nothing is out yet

  const AnswerReader& reader() const { return reader_; }
  const bool stream_;
  std::string out_;

 private:
  void on(engine::Started& e) { begin(e); }
  void on(engine::Tokens& e);
  void on(engine::Finished& e);
  void on(engine::Failed& e);

  AnswerReader reader_;
  std::unique_ptr<engine::Stream> engine_;
  Response head_;
  bool streaming_ = false, finished_ = false;
};

// "event: NAME\ndata: {...}\n\n"
void append_event(std::string& out, std::string_view name, std::string_view data);

}  // namespace kvasir::server::http
