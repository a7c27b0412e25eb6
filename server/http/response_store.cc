#include "server/http/response_store.h"

#include <algorithm>

namespace kvasir::server::http {

constexpr size_t kOverhead = 256;  // of an entry, beside its texts

void ResponseStore::keep(const std::string& tenant, const std::string& id, Kept kept) {
  std::lock_guard lock(mutex_);
  const size_t bytes = kept.response.size() + kept.input.size() + kept.messages.size() + id.size() + kOverhead;
  if (bytes > most_) return;
  while (bytes_ + bytes > most_) {
    auto most = std::max_element(tenants_.begin(), tenants_.end(),
                                 [](const auto& a, const auto& b) { return a.second.bytes < b.second.bytes; });
    drop(most, most->second.entries.begin());
  }
  Tenant& owner = tenants_[tenant];
  owner.entries.push_back({id, std::move(kept), bytes});
  owner.bytes += bytes;
  bytes_ += bytes;
}

std::optional<ResponseStore::Kept> ResponseStore::find(const std::string& tenant, const std::string& id) {
  std::lock_guard lock(mutex_);
  auto owner = tenants_.find(tenant);
  if (owner == tenants_.end()) return std::nullopt;
  for (const Entry& e : owner->second.entries)
    if (e.id == id) return e.kept;
  return std::nullopt;
}

bool ResponseStore::erase(const std::string& tenant, const std::string& id) {
  std::lock_guard lock(mutex_);
  auto owner = tenants_.find(tenant);
  if (owner == tenants_.end()) return false;
  auto& entries = owner->second.entries;
  auto it = std::find_if(entries.begin(), entries.end(), [&](const Entry& e) { return e.id == id; });
  if (it == entries.end()) return false;
  drop(owner, it);
  return true;
}

void ResponseStore::drop(std::map<std::string, Tenant>::iterator tenant, std::list<Entry>::iterator entry) {
  bytes_ -= entry->bytes;
  tenant->second.bytes -= entry->bytes;
  tenant->second.entries.erase(entry);
  if (tenant->second.entries.empty()) tenants_.erase(tenant);
}

}  // namespace kvasir::server::http
