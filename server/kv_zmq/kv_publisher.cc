#include "server/kv_zmq/kv_publisher.h"

#include <bit>
#include <chrono>
#include <cstring>

#include "core/cat.h"
#include "core/log.h"

namespace kvasir::server {
namespace {

using engine::CacheEvent;
constexpr std::chrono::milliseconds kLook{250};

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string big_endian(uint64_t v) {
  std::string out(8, '\0');
  for (int i = 7; i >= 0; --i, v >>= 8) out[size_t(i)] = char(v & 255);
  return out;
}

// As much of MessagePack as events need.
class Pack {
 public:
  void array(size_t n) { length(n, 0x90, 0xdc); }
  void map(size_t n) { length(n, 0x80, 0xde); }
  void nil() { put(0xc0); }
  void text(std::string_view s) {  // shorter than 32 bytes, all of them
    put(0xa0 | s.size());
    out_ += s;
  }
  void number(uint64_t v) {
    if (v < 128) return put(v);
    const int bytes = v >> 32 ? 8 : v >> 16 ? 4 : v >> 8 ? 2 : 1;
    put(0xcc + size_t(std::countr_zero(unsigned(bytes))));
    tail(v, bytes);
  }
  void real(double v) {
    put(0xcb);
    tail(std::bit_cast<uint64_t>(v), 8);
  }
  std::string take() { return std::move(out_); }

 private:
  void put(size_t byte) { out_ += char(byte); }
  void tail(uint64_t v, int bytes) { out_ += std::string_view(big_endian(v)).substr(size_t(8 - bytes)); }
  void length(size_t n, size_t few, size_t many) {
    if (n < 16) return put(few | n);
    put(n < 1 << 16 ? many : many + 1);
    tail(n, n < 1 << 16 ? 2 : 4);
  }
  std::string out_;
};

void field(Pack& p, std::string_view name, std::string_view text) {
  p.text(name);
  p.text(text);
}

void hashes(Pack& p, uint64_t hash) {
  p.text("block_hashes");
  p.array(1);
  p.number(hash);
}

}  // namespace

std::string kv_event_batch(const CacheEvent& e, int page_size, double now) {
  Pack p;
  p.array(3);
  p.real(now);
  p.array(1);
  switch (e.kind) {
    case CacheEvent::Kind::stored:
      p.map(8);
      field(p, "type", "BlockStored");
      hashes(p, e.hash);
      p.text("parent_block_hash");
      e.parent ? p.number(e.parent) : p.nil();
      p.text("token_ids");
      p.array(e.tokens.size());
      for (int32_t t : e.tokens) p.number(uint32_t(t));
      p.text("block_size");
      p.number(uint64_t(page_size));
      p.text("lora_id");
      p.nil();
      field(p, "medium", "GPU");  // where steps read it, whatever the device is
      p.text("lora_name");
      p.nil();
      break;
    case CacheEvent::Kind::removed:
      p.map(3);
      field(p, "type", "BlockRemoved");
      hashes(p, e.hash);
      field(p, "medium", "GPU");
      break;
    case CacheEvent::Kind::cleared:
      p.map(1);
      field(p, "type", "AllBlocksCleared");
      break;
  }
  p.number(0);  // the data-parallel rank
  return p.take();
}

void KvPublisherOptions::define(Options& o) {
  o.section("Cache events for routers");
  o.add(
       "kv_events", &address,
       "Publish cache events as vLLM does (ZeroMQ): tcp://*:5557 listens, tcp://HOST:5557 goes to who subscribes. They "
       "carry prompts' token ids and ask for no key; empty: none")
      .value_name("ADDRESS");
  o.add("kv_events_replay", &replay, "Where who missed some asks for them again, as tcp://*:5558; empty: nowhere")
      .value_name("ADDRESS");
  o.add("kv_events_topic", &topic, "Their topic; llm-d reads kv@ADDRESS@MODEL");
  o.add("kv_events_tenant", &tenant, "Whose prefixes they tell of; empty is who calls without a key");
  o.check([this]() -> Status {
    for (const auto& [name, value] : {std::pair{"kv_events", &address}, {"kv_events_replay", &replay}}) {
      if (value->empty()) continue;
      Status status = check_zmq_address(*value);
      if (!status.ok()) return invalid_argument(cat(name, " ", status.message())).with_field(name);
    }
    if (address.empty() && !replay.empty())
      return invalid_argument("kv_events_replay needs kv_events, of which it is a part");
    return {};
  });
}

Result<std::unique_ptr<KvPublisher>> KvPublisher::start(const KvPublisherOptions& options, const engine::Engine& engine,
                                                        int page_size) {
  auto events = engine.cache_events();
  if (!events) return failed_precondition("kv_events: this engine keeps no cache events");
  std::unique_ptr<KvPublisher> out(new KvPublisher(options, std::move(events), page_size));
  KVASIR_ASSIGN(out->zmq_, Zmq::open());
  KVASIR_ASSIGN(out->pub_, out->zmq_->socket(Zmq::Kind::pub, {.messages = kWaitingMessages}));
  KVASIR_TRY(out->pub_->attach(options.address));
  if (!options.replay.empty()) {
    KVASIR_ASSIGN(out->router_, out->zmq_->socket(Zmq::Kind::router,
                                                  {.messages = kWaitingMessages, .receive_ms = int(kLook.count())}));
    KVASIR_TRY(out->router_->attach(options.replay));
    out->replaying_ = std::thread([p = out.get()] { p->replay(); });
  }
  out->publishing_ = std::thread([p = out.get()] { p->publish(); });
  log_info("cache events are published",
           {{"address", options.address}, {"replay", options.replay}, {"topic", options.topic}});
  return out;
}

KvPublisher::~KvPublisher() {
  stopped_ = true;
  if (publishing_.joinable()) publishing_.join();
  if (replaying_.joinable()) replaying_.join();
}

// A message is one event and has its number, so that numbers rise by one and a gap is what was missed.
void KvPublisher::publish() {
  uint64_t version = 0, sent = 0;
  while (!stopped_) {
    bool lost = false;  // the ring went on without us: the gap in the numbers says so
    for (const CacheEvent& e : events_->since(options_.tenant, sent, &lost)) {
      pub_->send({options_.topic, big_endian(e.sequence), kv_event_batch(e, page_size_, now_seconds())});
      sent = e.sequence;
    }
    version = events_->wait(version, kLook);
  }
}

void KvPublisher::replay() {
  std::vector<std::string> asked;
  while (!stopped_) {
    if (!router_->receive(&asked) || asked.size() < 2 || asked.back().size() != 8) continue;
    uint64_t first = 0;
    for (char c : asked.back()) first = first << 8 | uint8_t(c);
    bool lost = false;
    for (const CacheEvent& e : events_->since(options_.tenant, first ? first - 1 : 0, &lost))
      router_->send(
          {asked[0], "", options_.topic, big_endian(e.sequence), kv_event_batch(e, page_size_, now_seconds())});
    router_->send({asked[0], "", "", big_endian(UINT64_MAX), ""});
  }
}

}  // namespace kvasir::server
