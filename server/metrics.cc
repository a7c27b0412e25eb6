#include "server/metrics.h"

namespace kvasir::server {

void Metrics::count(std::string_view protocol, Code code) {
  size_t p = kProtocols.size() - 1;
  for (size_t i = 0; i < kProtocols.size(); ++i)
    if (kProtocols[i] == protocol) p = i;
  requests_[p * kCodes + size_t(code)].fetch_add(1, std::memory_order_relaxed);
}

void Metrics::count_request(int64_t choices, std::optional<int64_t> max_tokens) {
  std::lock_guard lock(mutex_);
  of_requests_.choices.add(double(choices));
  if (max_tokens) of_requests_.max_tokens.add(double(*max_tokens));
}

void Metrics::count_inference(double seconds) {
  std::lock_guard lock(mutex_);
  of_requests_.inference.add(seconds);
}

Metrics::Requests Metrics::requests() const {
  std::lock_guard lock(mutex_);
  return of_requests_;
}

std::vector<Metrics::Outcome> Metrics::rows() const {
  std::vector<Outcome> rows;
  for (size_t i = 0; i < requests_.size(); ++i)
    if (int64_t n = requests_[i].load(std::memory_order_relaxed))
      rows.push_back({kProtocols[i / kCodes], Code(int(i % kCodes)), n});
  return rows;
}

}  // namespace kvasir::server
