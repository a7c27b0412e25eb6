#include "server/metrics.h"

namespace kvasir::server {

void Metrics::count(std::string_view protocol, Code code) {
  size_t p = kProtocols.size() - 1;
  for (size_t i = 0; i < kProtocols.size(); ++i)
    if (kProtocols[i] == protocol) p = i;
  requests_[p * kCodes + size_t(code)].fetch_add(1, std::memory_order_relaxed);
}

std::vector<Metrics::Row> Metrics::rows() const {
  std::vector<Row> rows;
  for (size_t i = 0; i < requests_.size(); ++i)
    if (int64_t n = requests_[i].load(std::memory_order_relaxed))
      rows.push_back({kProtocols[i / kCodes], Code(int(i % kCodes)), n});
  return rows;
}

}  // namespace kvasir::server
