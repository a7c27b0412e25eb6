// The adapters that requests may name. A request takes its own when it comes and holds it to its end, so unloading ends
// nothing; what is unloaded and still held counts against the memory until nobody holds it.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/status.h"
#include "model/adapter.h"

namespace kvasir::engine {

struct AdapterSource {
  std::string name, path;
};

struct AdapterInfo {
  std::string name, path;
  int64_t bytes = 0, rank = 0;
  int64_t running = 0, waiting = 0;  // requests
};

struct LoadedAdapter {
  AdapterInfo info;
  std::string cache_key;  // no other's, nor that of one that had this name before
  model::AdapterPtr adapter;
};
using LoadedAdapterPtr = std::shared_ptr<const LoadedAdapter>;

// 1 to 128 letters, digits, '-', '_', '.', ':', '/', '@' and '+', the first a letter or a digit.
Status check_adapter_name(const std::string& name);

class Adapters {
 public:
  using Load = std::function<Result<model::AdapterPtr>(const std::string& path, int64_t room)>;
  explicit Adapters(int64_t memory) : memory_(memory) {}

  // One after another; find() does not wait for them.
  Result<AdapterInfo> load(const std::string& name, const std::string& path, const Load& load);
  Status unload(const std::string& name);
  Result<LoadedAdapterPtr> find(const std::string& name) const;
  std::vector<AdapterInfo> all() const;  // by name

 private:
  const int64_t memory_;
  const std::shared_ptr<std::atomic<int64_t>> held_ = std::make_shared<std::atomic<int64_t>>(0);  // bytes
  std::mutex loading_;
  uint64_t loads_ = 0;
  mutable std::mutex mutex_;
  std::map<std::string, LoadedAdapterPtr> by_name_;
};

}  // namespace kvasir::engine
