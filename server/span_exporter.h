// Spans of requests to an OpenTelemetry collector, by OTLP over HTTP in its JSON form. A span waits in a bounded queue
// for a thread of its own, which sleeps while there is none: a collector that is slow or away costs spans, never time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "core/status.h"
#include "server/trace_context.h"

namespace kvasir::server {

struct Span {
  std::string name;
  TraceContext context;
  Time began{}, ended{};
  std::vector<std::pair<std::string, std::string>> texts;
  std::vector<std::pair<std::string, int64_t>> numbers;
  std::vector<std::pair<std::string, Time>> events;
  std::string error;  // empty: it ended well
};

// "http://host:port/path"; port 4318 and path /v1/traces when they are not said.
struct CollectorAddress {
  std::string host, path = "/v1/traces";
  int port = 4318;
};
Result<CollectorAddress> parse_collector(const std::string& url);

class SpanExporter {
 public:
  explicit SpanExporter(CollectorAddress collector);
  ~SpanExporter();  // sends what is left, if the collector takes it at once

  // A span without a trace gets one; one whose caller decided against sampling is not sent.
  void add(Span span);
  int64_t dropped() const { return dropped_.load(std::memory_order_relaxed); }
  int64_t sent() const { return sent_.load(std::memory_order_relaxed); }

 private:
  void run();
  Status post(const std::string& body) const;

  const CollectorAddress collector_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Span> queue_;
  bool stop_ = false;
  std::atomic<int64_t> dropped_{0}, sent_{0};
  std::thread thread_;
};

// The body of an export request.
std::string otlp_json(const std::vector<Span>& spans);

}  // namespace kvasir::server
