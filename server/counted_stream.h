// An answer's stream with what the server owes its request: the tenant's account, one count, one line of the log, one
// span.
#pragma once

#include <string>

#include "server/services.h"

namespace kvasir::server {

class Services::CountedStream final : public engine::Stream {
 public:
  CountedStream(Services& services, Caller caller, const GenerateInput& in, std::string trace_parent,
                std::unique_ptr<engine::Stream> inner, size_t prompt_tokens);
  ~CountedStream() override;  // counts, and writes the line

  const std::string& id() const override { return inner_->id(); }
  std::optional<engine::Event> poll() override { return seen(inner_->poll()); }
  std::optional<engine::Event> next() override { return seen(inner_->next()); }
  void on_ready(std::function<void()> callback) override { inner_->on_ready(std::move(callback)); }
  void cancel() override { inner_->cancel(); }

 private:
  std::optional<engine::Event> seen(std::optional<engine::Event> event);
  void count(int64_t tokens);
  void write_line(const std::string& id) const;
  void export_span(const std::string& id);

  Services& services_;
  const Caller caller_;
  const char* protocol_;
  const std::string trace_parent_;
  const GenerateInput::Said said_;
  std::unique_ptr<engine::Stream> inner_;
  const size_t prompt_tokens_;
  const Time began_;
  Time started_{}, first_{};
  int64_t output_ = 0, cached_ = 0;
  bool over_ = false;
  Code code_ = Code::ok;
  const char* reason_ = "";
  std::string error_, answer_;  // all choices' text, as it came, for the log
};

}  // namespace kvasir::server
