#include "server/grpc/kv_events.h"

#include <algorithm>

#include "core/cat.h"

namespace kvasir::server::rpc {

namespace smg = ::smg::grpc::common;
using engine::CacheEvent;

// One subscriber. A batch carries one event and its number, so that the numbers rise by one.
class KvSubscription final : public grpc::ServerWriteReactor<smg::KvEventBatch>,
                             public std::enable_shared_from_this<KvSubscription> {
 public:
  KvSubscription(KvEvents& owner, grpc::CallbackServerContext* call, const smg::SubscribeKvEventsRequest& request)
      : owner_(owner), call_(call), start_(request.start_sequence_number()) {}

  // On a worker: who may, and from where.
  void begin() {
    Status status = check();
    if (!status.ok()) return end(to_grpc(status, call_));
    owner_.add(this);
    {
      std::lock_guard lock(mutex_);
      if (finished_) return;
      StartSendInitialMetadata();  // the subscriber knows from now on that nothing is missed
      ready_ = true;
    }
    news();
  }
  // Owns itself until gRPC is done with it.
  void hold() { self_ = shared_from_this(); }
  void news() {
    std::lock_guard lock(mutex_);
    write();
  }
  void end(const grpc::Status& status) {
    std::lock_guard lock(mutex_);
    if (finished_) return;
    finished_ = true;
    Finish(status);
  }
  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
    writing_ = false;
    if (ok) write();
  }
  void OnCancel() override { end(grpc::Status(grpc::StatusCode::CANCELLED, "the subscriber went away")); }
  void OnDone() override {
    owner_.remove(this);
    auto last = std::move(self_);
  }
  bool done = false;  // under the owner's lock

 private:
  Status check() {
    Services& services = owner_.c_.services;
    KVASIR_ASSIGN(Caller caller, caller_of(services, *call_));
    KVASIR_TRY(caller.require(Role::admin, "SubscribeKvEvents"));
    events_ = services.engine().cache_events();
    if (!events_) return unimplemented("SubscribeKvEvents: this engine keeps no cache events");
    tenant_ = caller.tenant;
    page_size_ = services.options().page_size;
    sent_ = start_ > 0 ? start_ - 1 : events_->last(tenant_);
    return {};
  }

  void write() {
    if (!ready_ || writing_ || finished_) return;
    if (pending_.empty()) {
      bool lost = false;
      auto fresh = events_->since(tenant_, sent_, &lost);
      if (fresh.empty()) return;
      // What the ring has lost cannot be made up for: the subscriber sees the gap in the numbers.
      pending_.assign(std::make_move_iterator(fresh.begin()), std::make_move_iterator(fresh.end()));
    }
    fill(pending_.front());
    sent_ = pending_.front().sequence;
    pending_.pop_front();
    writing_ = true;
    StartWrite(&batch_);
  }

  void fill(const CacheEvent& e) {
    batch_.Clear();
    batch_.set_sequence_number(e.sequence);
    batch_.set_timestamp(std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count());
    batch_.set_dp_rank(0);
    smg::KvCacheEvent& to = *batch_.add_events();
    to.set_event_id(e.sequence);
    switch (e.kind) {
      case CacheEvent::Kind::stored: {
        smg::KvBlocksStored& stored = *to.mutable_stored();
        smg::KvBlock& block = *stored.add_blocks();
        block.set_block_hash(int64_t(e.hash));
        block.set_block_size(page_size_);
        for (int32_t t : e.tokens) block.add_token_ids(uint32_t(t));
        if (e.parent != 0) stored.set_parent_block_hash(int64_t(e.parent));
        stored.set_tier(smg::KV_CACHE_TIER_DEVICE);
        stored.set_locality(smg::KV_CACHE_LOCALITY_LOCAL);
        break;
      }
      case CacheEvent::Kind::removed:
        to.mutable_removed()->add_block_hashes(int64_t(e.hash));
        to.mutable_removed()->set_tier(smg::KV_CACHE_TIER_DEVICE);
        break;
      case CacheEvent::Kind::cleared: to.mutable_cleared(); break;
    }
  }

  KvEvents& owner_;
  grpc::CallbackServerContext* const call_;
  const uint64_t start_;
  std::shared_ptr<const engine::CacheEvents> events_;
  std::string tenant_;
  int32_t page_size_ = 16;
  std::mutex mutex_;
  std::deque<CacheEvent> pending_;
  smg::KvEventBatch batch_;
  uint64_t sent_ = 0;
  bool ready_ = false, writing_ = false, finished_ = false;
  std::shared_ptr<KvSubscription> self_;
};

KvEvents::KvEvents(const Context& context) : c_(context), thread_([this] { look(); }) {}

KvEvents::~KvEvents() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

grpc::ServerWriteReactor<smg::KvEventBatch>* KvEvents::subscribe(grpc::CallbackServerContext* call,
                                                                 const smg::SubscribeKvEventsRequest* request) {
  auto subscription = std::make_shared<KvSubscription>(*this, call, *request);
  subscription->hold();
  if (!c_.workers.post([subscription] { subscription->begin(); }))
    subscription->end(to_grpc(resource_exhausted("the server has too many calls to look at; try again"), call));
  return subscription.get();
}

void KvEvents::add(KvSubscription* s) {
  {
    std::lock_guard lock(mutex_);
    if (s->done) return;
    subscriptions_.push_back(s);
  }
  wake_.notify_all();
}

void KvEvents::remove(KvSubscription* s) {
  std::lock_guard lock(mutex_);
  subscriptions_.remove(s);
  s->done = true;
}

void KvEvents::look() {
  uint64_t version = 0;
  std::unique_lock lock(mutex_);
  while (!stopped_) {
    if (subscriptions_.empty()) {
      wake_.wait(lock);
      continue;
    }
    auto events = c_.services.engine().cache_events();
    lock.unlock();
    version = events->wait(version, std::chrono::milliseconds(500));
    lock.lock();
    for (KvSubscription* s : subscriptions_) s->news();  // none is destroyed meanwhile: remove() wants the lock
  }
}

}  // namespace kvasir::server::rpc
