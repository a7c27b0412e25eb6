#include "scheduler/recorder.h"

#include "core/cat.h"
#include "scheduler/options_json.h"

namespace kvasir::scheduler {
namespace {

uint64_t mix(uint64_t a, uint64_t b) {
  __uint128_t m = static_cast<__uint128_t>(a ^ 0x9e3779b97f4a7c15ull) * (b ^ 0xd1b54a32d192ed03ull);
  return static_cast<uint64_t>(m) ^ static_cast<uint64_t>(m >> 64);
}

void put_hex(std::string& out, uint64_t value, int digits) {
  for (int shift = 4 * (digits - 1); shift >= 0; shift -= 4) out += "0123456789abcdef"[value >> shift & 15];
}

template <class... Args>
void put(std::string& out, const Args&... args) {
  (cat_one(out, args), ...);
}

int64_t nanoseconds(Time t) { return std::chrono::nanoseconds(t.time_since_epoch()).count(); }

}  // namespace

uint64_t plan_digest(const StepPlan& plan, int32_t page_size) {
  uint64_t h = plan.step;
  auto pair = [&h](int64_t a, int64_t b) { h = mix(h + static_cast<uint64_t>(a), static_cast<uint64_t>(b)); };
  auto pages = [&](std::span<const int32_t> table, size_t from) {
    pair(static_cast<int64_t>(table.size()), static_cast<int64_t>(from));
    for (size_t i = from; i < table.size(); ++i) h = mix(h, static_cast<uint32_t>(table[i]));
  };
  for (const PlanItem& i : plan.items) {
    pair(static_cast<int64_t>(i.seq), static_cast<int64_t>(i.request));
    pair(i.begin, i.count);
    pair(i.choice * 8 + int(i.phase) * 2 + int(i.samples), i.draws * 2 + int(i.awaits_token));
    // A decode's older pages were in the plans before it; a prefill may start with what it found.
    const size_t from = i.phase == Phase::prefill ? 0 : static_cast<size_t>(i.begin / page_size);
    pages(i.pages, from);
    for (const auto& table : i.more_pages) pages(table, from);
  }
  for (const PageCopy& c : plan.copies) pair(int64_t(c.from) << 32 | c.to, int64_t(c.tokens) << 8 | c.group);
  for (const PageMove& m : plan.moves) pair(int64_t(m.device) << 32 | m.host, m.to_host);
  return h;
}

uint64_t Recorder::chain(uint64_t before, int32_t token) const { return mix(before ^ key_, uint64_t(token) + 1); }

// 31 bits: an id is not negative.
void Recorder::put_token(uint64_t chain) { put_hex(lines_, chain & 0x7fffffff, 8); }

void Recorder::end_line() {
  lines_ += "}\n";
  if (lines_.size() >= chunk_) flush();
}

void Recorder::flush() {
  if (lines_.empty()) return;
  std::string out;
  out.reserve(chunk_ + chunk_ / 4);
  std::swap(out, lines_);
  sink_(std::move(out));
}

void Recorder::begin(const Settings& options) {
  put(lines_, "{\"kvasir_recording\":1,\"about\":", json_string(about_), ",\"options\":", options_to_json(options));
  end_line();
}

void Recorder::submit(const Submission& s, Time now) {
  put(lines_, "{\"call\":\"submit\",\"t\":", nanoseconds(now), ",\"id\":", s.id, ",\"tenant\":", json_string(s.tenant),
      ",\"n\":", s.n, ",\"priority\":", s.priority);
  if (s.weight > 0) put(lines_, ",\"weight\":", s.weight);
  if (s.beam) lines_ += ",\"beam\":true";
  if (s.max_new) put(lines_, ",\"max_new\":", *s.max_new);
  if (s.deadline) put(lines_, ",\"deadline\":", nanoseconds(*s.deadline));
  auto secret = [&](const char* name, const std::string& text) {
    if (text.empty()) return;
    uint64_t h = key_;
    for (unsigned char c : text) h = mix(h, c);
    put(lines_, ",\"", name, "\":\"");
    put_hex(lines_, h, 16);
    lines_ += '"';
  };
  secret("salt", s.cache_salt);
  secret("adapter", s.adapter);
  if (s.no_prefix_read) lines_ += ",\"no_prefix_read\":true";
  if (s.no_prefix) lines_ += ",\"no_prefix\":true";
  if (s.whole) lines_ += ",\"whole\":true";
  if (s.needs_mask) lines_ += ",\"needs_mask\":true";
  lines_ += ",\"prompt\":\"";
  prompt_ = 0;
  for (int32_t t : s.prompt) put_token(prompt_ = chain(prompt_, t));
  lines_ += '"';
}

void Recorder::submitted(const Result<SeqId>& first, int32_t n) {
  if (first.ok()) {
    put(lines_, ",\"seq\":", *first);
    for (SeqId c = 0; c < static_cast<SeqId>(n); ++c) choices_[*first + c] = {prompt_, *first};
  } else {
    put(lines_, ",\"refused\":\"", code_name(first.status().code()), '"');
  }
  end_line();
}

void Recorder::request_call(const char* name, RequestId id) {
  put(lines_, "{\"call\":\"", name, "\",\"id\":", id);
  end_line();
}

void Recorder::mask_ready(SeqId seq) {
  put(lines_, "{\"call\":\"mask_ready\",\"seq\":", seq);
  end_line();
}

void Recorder::stop_at(SeqId seq, int64_t output_tokens) {
  put(lines_, "{\"call\":\"stop_at\",\"seq\":", seq, ",\"tokens\":", output_tokens);
  end_line();
}

void Recorder::propose(SeqId seq, std::span<const int32_t> draft) {
  put(lines_, "{\"call\":\"propose\",\"seq\":", seq, ",\"draft\":\"");
  auto it = choices_.find(seq);
  uint64_t h = it == choices_.end() ? 0 : it->second.chain;
  for (int32_t t : draft) put_token(h = chain(h, t));
  lines_ += '"';
  end_line();
}

void Recorder::flush_prefix_cache() {
  lines_ += "{\"call\":\"flush\"";
  end_line();
}

void Recorder::step(Time now, const StepPlan& plan, int32_t page_size) {
  put(lines_, "{\"call\":\"step\",\"t\":", nanoseconds(now));
  if (!plan.empty()) {
    lines_ += ",\"plan\":\"";
    put_hex(lines_, plan_digest(plan, page_size), 16);
    lines_ += '"';
  }
  end_line();
}

// Beams go on from the parents they had before this call: so the chains are set when all are known.
void Recorder::advance(std::span<const SeqResult> results, Time now) {
  put(lines_, "{\"call\":\"advance\",\"t\":", nanoseconds(now), ",\"results\":[");
  after_.clear();
  const char* comma = "";
  for (const SeqResult& r : results) {
    put(lines_, comma, '[', r.seq, ",\"");
    comma = ",";
    auto it = choices_.find(r.seq);
    uint64_t h = 0;
    if (it != choices_.end()) {
      h = it->second.chain;
      auto parent = r.parent < 0 ? it : choices_.find(it->second.first + static_cast<SeqId>(r.parent));
      if (parent != choices_.end()) h = parent->second.chain;
    }
    for (int32_t t : r.tokens) put_token(h = chain(h, t));
    if (it != choices_.end()) after_.emplace_back(&it->second, h);
    put(lines_, "\",", int(r.stop), ',', r.parent, ']');
  }
  for (auto& [choice, h] : after_) choice->chain = h;
  lines_ += ']';
  end_line();
}

void Recorder::forget(SeqId first, int32_t n) {
  for (SeqId c = 0; c < static_cast<SeqId>(n); ++c) choices_.erase(first + c);
}

}  // namespace kvasir::scheduler
