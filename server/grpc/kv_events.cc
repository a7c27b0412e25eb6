#include "server/grpc/kv_events.h"

#include <algorithm>

#include "server/grpc/kv_subscription.h"

namespace kvasir::server::rpc {

namespace smg = ::smg::grpc::common;

KvEvents::KvEvents(const Context& context) : c_(context), thread_([this] { look(); }) {}

KvEvents::~KvEvents() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

std::shared_ptr<Incoming> KvEvents::subscribe(Opening opening) {
  return std::make_shared<KvSubscription>(*this, std::move(opening));
}

void KvEvents::add(KvSubscription* s) {
  {
    std::lock_guard lock(mutex_);
    subscriptions_.push_back(s);
    measure();
    s->news(load_, load_version_);
  }
  wake_.notify_all();
}

void KvEvents::remove(KvSubscription* s) {
  std::lock_guard lock(mutex_);
  subscriptions_.remove(s);
}

void KvEvents::look() {
  uint64_t version = 0;
  std::unique_lock lock(mutex_);
  while (!stopped_) {
    if (subscriptions_.empty()) {
      wake_.wait(lock);
      continue;
    }
    measure();
    for (KvSubscription* s : subscriptions_) s->news(load_, load_version_);  // none goes meanwhile: remove() waits
    auto events = c_.services.engine().cache_events();
    lock.unlock();
    version = events->wait(version, std::chrono::milliseconds(250));
    lock.lock();
  }
}

// What GetLoads answers with, looked at no more often than it is worth.
void KvEvents::measure() {
  auto now = std::chrono::steady_clock::now();
  if (load_version_ > 0 && now - measured_ < std::chrono::milliseconds(100)) return;
  measured_ = now;
  engine::Stats s = c_.services.engine().stats();
  const ServerOptions& o = c_.services.options();
  int64_t used = s.pages_total - s.pages_free - s.pages_cached;
  double total = double(std::max<int64_t>(1, s.pages_total));
  smg::EngineLoad load;
  load.set_running_requests(uint32_t(s.running));
  load.set_waiting_requests(uint32_t(s.waiting + s.paused));
  load.set_token_usage(double(used) / total);
  load.set_active_token_usage(double(used) / total);
  load.set_gen_throughput(s.outputs_per_second);
  load.set_max_running_requests(uint32_t(o.max_running));
  load.set_waiting_uncached_tokens(uint32_t(std::min<int64_t>(s.waiting_uncached_tokens(), UINT32_MAX)));
  if (s.prompt_tokens > 0) load.set_cache_hit_rate(s.cache_hit_rate());
  load.set_num_used_tokens(int32_t(std::min<int64_t>(used * o.page_size, INT32_MAX)));
  load.set_max_total_num_tokens(int32_t(std::min<int64_t>(s.pages_total * o.page_size, INT32_MAX)));
  load.mutable_queues()->set_waiting(int32_t(s.waiting));
  load.mutable_queues()->set_paused(int32_t(s.paused));
  if (load_version_ > 0 && load.SerializeAsString() == load_.SerializeAsString()) return;
  load_ = std::move(load);
  ++load_version_;
}

}  // namespace kvasir::server::rpc
