#include "server/http/response_store.h"

#include <algorithm>

namespace kvasir::server::http {

constexpr size_t kOverhead = 256;  // of an entry, beside its texts

std::list<ResponseStore::Entry>::iterator ResponseStore::entry_of(Tenant& owner, const std::string& id) {
  return std::find_if(owner.entries.begin(), owner.entries.end(), [&](const Entry& e) { return e.id == id; });
}

size_t ResponseStore::bytes_of(const std::string& id, const Kept& kept) {
  return kept.response.size() + kept.input.size() + kept.messages.size() + id.size() + kOverhead +
         (kept.background ? kept.background->bytes() : 0);
}

void ResponseStore::make_room(size_t bytes) {
  while (!tenants_.empty() && bytes_ + bytes > most_) {
    auto most = std::max_element(tenants_.begin(), tenants_.end(),
                                 [](const auto& a, const auto& b) { return a.second.bytes < b.second.bytes; });
    drop(most, most->second.entries.begin());
  }
}

bool ResponseStore::add(const std::string& tenant, const std::string& id, Kept kept) {
  const size_t bytes = bytes_of(id, kept);
  if (bytes > most_) {
    if (kept.background) kept.background->cancel();
    return false;
  }
  make_room(bytes);
  Tenant& owner = tenants_[tenant];
  owner.entries.push_back({id, std::move(kept), bytes});
  owner.bytes += bytes;
  bytes_ += bytes;
  return true;
}

void ResponseStore::keep(const std::string& tenant, const std::string& id, Kept kept) {
  std::lock_guard lock(mutex_);
  if (auto owner = tenants_.find(tenant); owner != tenants_.end())  // a client may give its requests one id
    if (auto before = entry_of(owner->second, id); before != owner->second.entries.end()) drop(owner, before);
  add(tenant, id, std::move(kept));
}

bool ResponseStore::replace(const std::string& tenant, const std::string& id, Kept kept) {
  std::lock_guard lock(mutex_);
  auto owner = tenants_.find(tenant);
  if (owner == tenants_.end()) return false;
  auto before = entry_of(owner->second, id);
  if (before == owner->second.entries.end() || before->kept.background != kept.background) return false;
  drop(owner, before, false);
  return add(tenant, id, std::move(kept));
}

bool ResponseStore::recount(const std::string& tenant, const std::string& id) {
  std::lock_guard lock(mutex_);
  auto owner = tenants_.find(tenant);
  if (owner == tenants_.end()) return false;
  auto it = entry_of(owner->second, id);
  if (it == owner->second.entries.end()) return false;
  Kept kept = it->kept;
  drop(owner, it, false);
  return add(tenant, id, std::move(kept));
}

std::optional<ResponseStore::Kept> ResponseStore::find(const std::string& tenant, const std::string& id) {
  std::lock_guard lock(mutex_);
  auto owner = tenants_.find(tenant);
  if (owner == tenants_.end()) return std::nullopt;
  auto it = entry_of(owner->second, id);
  if (it == owner->second.entries.end()) return std::nullopt;
  return it->kept;
}

bool ResponseStore::erase(const std::string& tenant, const std::string& id) {
  std::lock_guard lock(mutex_);
  auto owner = tenants_.find(tenant);
  if (owner == tenants_.end()) return false;
  auto it = entry_of(owner->second, id);
  if (it == owner->second.entries.end()) return false;
  drop(owner, it);
  return true;
}

void ResponseStore::drop(std::map<std::string, Tenant>::iterator tenant, std::list<Entry>::iterator entry,
                         bool cancels) {
  if (cancels && entry->kept.background) entry->kept.background->cancel();
  bytes_ -= entry->bytes;
  tenant->second.bytes -= entry->bytes;
  tenant->second.entries.erase(entry);
  if (tenant->second.entries.empty()) tenants_.erase(tenant);
}

}  // namespace kvasir::server::http
