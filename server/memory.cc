#include "server/memory.h"

#include <malloc.h>

#include <atomic>
#include <chrono>
#include <utility>

#include "core/cat.h"

namespace kvasir::server {
namespace {

constexpr size_t kMuch = 64 << 20;
constexpr int64_t kBetween = 1'000'000'000;  // nanoseconds
constexpr int kFreeEnd = 4 << 20;

size_t counted(size_t bytes) { return bytes > ByteBudget::kFree ? bytes - ByteBudget::kFree : 0; }

}  // namespace

ByteBudget::Share& ByteBudget::Share::operator=(Share&& other) noexcept {
  resize(0);
  budget_ = std::exchange(other.budget_, nullptr);
  tenant_ = std::move(other.tenant_);
  held_ = std::exchange(other.held_, 0);
  return *this;
}

bool ByteBudget::Share::resize(size_t bytes) {
  const size_t wanted = counted(bytes);
  if (!budget_ || wanted == held_) return true;
  if (!budget_->change(tenant_, held_, wanted)) return false;
  held_ = wanted;
  return true;
}

Status ByteBudget::Share::hold(size_t bytes) {
  if (resize(bytes)) return {};
  return resource_exhausted(cat("the server holds as many bytes of requests as it may, ", budget_->total_,
                                " (max_held); try again, or send less at once"))
      .with_retry_after(std::chrono::seconds(1));
}

bool ByteBudget::change(const std::string& tenant, size_t from, size_t to) {
  bool emptied = false;
  {
    std::lock_guard lock(mutex_);
    size_t& mine = by_tenant_[tenant];
    const size_t all = held_ - from + to, of_tenant = mine - from + to;
    // Without keys there is one tenant, and nobody to keep room for.
    const size_t most = tenant.empty() ? total_ : total_ / 4 * 3;
    if (to > from && (all > total_ || of_tenant > most)) {
      if (mine == 0) by_tenant_.erase(tenant);
      return false;
    }
    held_ = all;
    highest_ = std::max(highest_, held_);
    mine = of_tenant;
    if (mine == 0) by_tenant_.erase(tenant);
    if (held_ == 0) emptied = std::exchange(highest_, 0) > kMuch;
  }
  if (emptied) give_memory_back();
  return true;
}

void give_memory_back() {
  static std::atomic<int64_t> last{0};
  const int64_t now = std::chrono::steady_clock::now().time_since_epoch().count();
  int64_t before = last.load();
  if (now - before < kBetween || !last.compare_exchange_strong(before, now)) return;
  if (mallinfo2().fordblks > kMuch) malloc_trim(kMuch / 8);
}

void bound_free_ends() {
  mallopt(M_TRIM_THRESHOLD, kFreeEnd);
  mallopt(M_MMAP_THRESHOLD, kFreeEnd);  // else 128 KiB, and a body of a few hundred costs a system call
}

}  // namespace kvasir::server
