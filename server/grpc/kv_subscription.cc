#include "server/grpc/kv_subscription.h"

#include "core/cat.h"

namespace kvasir::server::rpc {

namespace smg = ::smg::grpc::common;
using engine::CacheEvent;

namespace {

constexpr size_t kChunkTokens = 64 << 10;  // some 300 KiB of a snapshot: well inside any client's message limit
constexpr std::chrono::seconds kHeartbeat{5};

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

void write_stored(const CacheEvent& e, int32_t page_size, smg::KvBlocksStored& to) {
  smg::KvBlock& block = *to.add_blocks();
  block.set_block_hash(int64_t(e.hash));
  block.set_block_size(page_size);
  block.mutable_token_ids()->Reserve(int(e.tokens.size()));
  for (int32_t t : e.tokens) block.add_token_ids(uint32_t(t));
  if (e.parent != 0) to.set_parent_block_hash(int64_t(e.parent));
  to.set_tier(smg::KV_CACHE_TIER_DEVICE);
  to.set_locality(smg::KV_CACHE_LOCALITY_LOCAL);
}

}  // namespace

void KvSubscription::look() {
  start_ = request_->start_sequence_number();
  load_before_first_ = request_->load_records_before_first_batch();
  forget_request();
  Status status = check();
  if (!status.ok()) return end(to_grpc(status, call_));
  {
    std::lock_guard lock(mutex_);
    if (finished()) return;
    StartSendInitialMetadata();  // the subscriber knows from now on that nothing is missed
    ready_ = true;
  }
  owner_.add(this);  // and it begins to write
}

Status KvSubscription::check() {
  Services& services = context_.services;
  events_ = services.engine().cache_events();
  if (!events_) return unimplemented("SubscribeKvEvents: this engine keeps no cache events");
  page_size_ = services.options().page_size;
  uint64_t last = events_->last(caller_.tenant);
  if (start_ > last + 1)
    return Status(Code::out_of_range, cat("start_sequence_number is ", start_, "; the last event here is ", last,
                                          ", so this is another engine's cursor or one of before a restart: ask for 0"))
        .with_field("start_sequence_number");
  if (start_ > 0) {
    sent_ = start_ - 1;
  } else {
    take_snapshot();
  }
  return {};
}

// In chunks numbered up to the last event the state includes: every page in it was an event once, so there are never
// more chunks than numbers.
void KvSubscription::take_snapshot() {
  std::vector<CacheEvent> live = events_->snapshot(caller_.tenant, &sent_);
  if (sent_ == 0) return;
  Batch* chunk = nullptr;
  size_t tokens = 0;
  auto open = [&] {
    chunk = &snapshot_.emplace_back();
    chunk->mutable_snapshot()->set_blocks(live.size());
    chunk->set_dp_rank(0);
    tokens = 0;
  };
  open();
  chunk->add_events()->mutable_cleared();
  for (const CacheEvent& e : live) {
    if (tokens >= kChunkTokens) open();
    write_stored(e, page_size_, *chunk->add_events()->mutable_stored());
    tokens += e.tokens.size();
  }
  for (size_t i = 0; i < snapshot_.size(); ++i) {
    snapshot_[i].set_sequence_number(sent_ + 1 - snapshot_.size() + i);
    snapshot_[i].mutable_snapshot()->set_index(uint32_t(i));
    snapshot_[i].mutable_snapshot()->set_count(uint32_t(snapshot_.size()));
  }
}

void KvSubscription::news(const Load& load, uint64_t load_version) {
  std::lock_guard lock(mutex_);
  load_ = load;
  load_version_ = load_version;
  write();
}

void KvSubscription::OnWriteDone(bool ok) {
  std::lock_guard lock(mutex_);
  writing_ = false;
  if (ok) write();
}
void KvSubscription::OnCancel() { end(grpc::Status(grpc::StatusCode::CANCELLED, "the subscriber went away")); }
void KvSubscription::write() {
  if (!ready_ || writing_ || finished()) return;
  bool some = next_batch();
  if (!some) some = next_load();
  if (!some) return;
  batch_.set_timestamp(now_seconds());
  if (load_version_ > 0) {
    bool alone = batch_.events_size() == 0;
    *batch_.mutable_load() = load_;
    batch_.mutable_load()->set_sample(++sample_);
    batch_.mutable_load()->set_load_only(alone);
    load_sent_ = load_version_;
  }
  last_number_ = batch_.sequence_number();
  wrote_ = Clock::now();
  writing_ = true;
  serialize(batch_, bytes_);
  StartWrite(&bytes_);
}

bool KvSubscription::next_batch() {
  if (snapshot_.empty() && pending_.empty()) {
    bool lost = false;
    auto fresh = events_->since(caller_.tenant, sent_, &lost);
    if (lost) {  // the ring went past the cursor: only the whole state makes up for it
      take_snapshot();
    } else {
      pending_.assign(std::make_move_iterator(fresh.begin()), std::make_move_iterator(fresh.end()));
    }
  }
  if (!snapshot_.empty()) {
    batch_ = std::move(snapshot_.front());
    snapshot_.pop_front();
    return true;
  }
  if (pending_.empty()) return false;
  fill(pending_.front());
  sent_ = pending_.front().sequence;
  pending_.pop_front();
  return true;
}

// The load alone, when it changed or as a sign of life. Before the first batch only for those who asked for it: others
// would take a batch numbered 0 for an event they have seen.
bool KvSubscription::next_load() {
  if (load_version_ == 0 || (last_number_ == 0 && !load_before_first_)) return false;
  if (load_version_ == load_sent_ && Clock::now() - wrote_ < kHeartbeat) return false;
  batch_.Clear();
  batch_.set_sequence_number(last_number_);
  batch_.set_dp_rank(0);
  return true;
}

// A batch carries one event and its number, so that the numbers rise by one.
void KvSubscription::fill(const CacheEvent& e) {
  batch_.Clear();
  batch_.set_sequence_number(e.sequence);
  batch_.set_dp_rank(0);
  smg::KvCacheEvent& to = *batch_.add_events();
  to.set_event_id(e.sequence);
  switch (e.kind) {
    case CacheEvent::Kind::stored: write_stored(e, page_size_, *to.mutable_stored()); break;
    case CacheEvent::Kind::removed:
      to.mutable_removed()->add_block_hashes(int64_t(e.hash));
      to.mutable_removed()->set_tier(smg::KV_CACHE_TIER_DEVICE);
      break;
    case CacheEvent::Kind::cleared: to.mutable_cleared(); break;
  }
}

}  // namespace kvasir::server::rpc
