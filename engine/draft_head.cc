#include "engine/draft_head.h"

#include <algorithm>
#include <chrono>
#include <numeric>

#include "core/check.h"

namespace kvasir::engine {
namespace {

using scheduler::Phase;

// Rows that wait for a draft to be wanted; with twice as many they are taken up, or let go where drafts do not pay.
constexpr int64_t kWaiting = 16;
constexpr scheduler::SeqId kMeasured = ~scheduler::SeqId(0);  // no sequence's

}  // namespace

Result<std::unique_ptr<DraftHead>> DraftHead::create(std::unique_ptr<model::Runner> runner, const Limits& limits) {
  KVASIR_CHECK(runner->info().given > 0, "a runner that is no head");
  KVASIR_TRY(runner->allocate_cache(limits.pages));
  std::unique_ptr<DraftHead> made(new DraftHead(std::move(runner), limits));
  KVASIR_TRY(made->measure());
  return made;
}

DraftHead::DraftHead(std::unique_ptr<model::Runner> runner, const Limits& limits)
    : runner_(std::move(runner)),
      limits_(limits),
      learned_(scheduler::StepCost()),
      free_(size_t(limits.pages)),
      starts_(kvcache::IndexMode::page_table, limits.page_size) {
  std::iota(free_.rbegin(), free_.rend(), 0);
  greedy_.temperature = 0;
}

// What a step takes is not known of this head, and whether it pays is known only then.
Status DraftHead::measure() {
  for (int64_t length : {2, 3, 16, 2, 16}) {
    length = std::min(length, most_rows() - 4);
    if (length < 2) break;
    const std::vector<int32_t> tokens(size_t(length), 0);
    const std::vector<float> states(size_t((length - 1) * info().given), 0);
    see({kMeasured, tokens, 0, length - 1, states.data()});
    Want want{kMeasured, tokens, 4, {}};
    KVASIR_TRY(draft({&want, 1}, 1));
    forget(kMeasured);
    forget_ended();
  }
  seconds_ = 0;
  return {};
}

int64_t DraftHead::most_rows() const {
  return std::min<int64_t>(info().context_length, limits_.pages * limits_.page_size);
}

double DraftHead::token_us(int64_t context, double sequences) const {
  const scheduler::StepCost& c = learned_.cost();
  return c.fixed_us / sequences + c.decode_token_us + c.decode_context_us * double(context);
}

double DraftHead::prefill_us(int64_t begin, int64_t count) const {
  scheduler::StepTime work;
  if (count > 0) scheduler::add_work(work, Phase::prefill, begin, count);
  return 1e6 * scheduler::step_seconds(work, learned_.cost()) - learned_.cost().fixed_us;
}

int64_t DraftHead::free_pages() const {
  auto out = int64_t(free_.size());
  for (const auto& [seq, held] : held_)
    if (held.ended) out += int64_t(held.pages.size());
  return out;
}

bool DraftHead::takes(scheduler::SeqId seq, std::span<const int32_t> tokens) const {
  auto it = held_.find(seq);
  if (it == held_.end()) return false;
  const Held& held = it->second;
  return !held.off && !held.waiting.empty() && held.next + 1 == int64_t(tokens.size());
}

// What it has in the cache may be of use to another that begins alike.
void DraftHead::forget(scheduler::SeqId seq) {
  auto it = held_.find(seq);
  if (it == held_.end()) return;
  Held& held = it->second;
  if (held.pages.empty()) return void(held_.erase(it));
  held.ended = true;
  held.waiting = {};
}

void DraftHead::forget_ended() {
  std::erase_if(held_, [this](const auto& one) {
    if (!one.second.ended) return false;
    free_.insert(free_.end(), one.second.pages.begin(), one.second.pages.end());
    return true;
  });
}

// A row counts once its own token is no draft any more. One that was computed again (a preemption) is known.
void DraftHead::see(const Seen& rows) {
  if (rows.tokens.empty()) return;  // it has ended
  Held& held = held_[rows.seq];
  if (rows.tokens.size() > held.tokens.size())
    held.tokens.insert(held.tokens.end(), rows.tokens.begin() + int64_t(held.tokens.size()), rows.tokens.end());
  const int64_t end = std::min(rows.begin + rows.count, int64_t(rows.tokens.size()) - 1);
  const int64_t from = std::max(rows.begin, held.next);
  if (held.off || from >= end) return;
  if (rows.begin > held.next) held.waiting.clear();  // nobody has computed what lies between
  const int64_t width = info().given;
  held.waiting.insert(held.waiting.end(), rows.kept + (from - rows.begin) * width,
                      rows.kept + (end - rows.begin) * width);
  held.next = end;
}

// Rows of a prompt, and of sequences that were not drafted for lately.
Status DraftHead::catch_up(bool pays) {
  ++call_;
  std::vector<Row> rows;
  for (auto& [seq, held] : held_) {
    const int64_t count = waiting(held);
    if (count < 2 * kWaiting) continue;
    if (pays && prepare(held, count)) {
      rows.push_back({&held, nullptr, held.next - count + 1, count, held.waiting.data(), info().given});
      continue;
    }
    held.waiting.erase(held.waiting.begin(), held.waiting.end() - kWaiting * info().given);
  }
  KVASIR_TRY(failed_);
  return take_up(std::move(rows));
}

Status DraftHead::draft(std::span<Want> wants, double /*seconds*/) {
  ++call_;
  state_.clear();
  std::vector<Row> rows;
  rows.reserve(wants.size());
  for (Want& w : wants) {
    w.draft.clear();
    auto it = held_.find(w.seq);
    if (it == held_.end() || !takes(w.seq, w.tokens)) w.count = 0;
    if (w.count <= 0) continue;
    Held& held = it->second;
    const int64_t count = waiting(held);
    w.count = int(std::min<int64_t>(w.count, most_rows() - count));
    if (w.count <= 0 || !prepare(held, count + w.count - 1)) {
      w.count = 0;
      continue;
    }
    rows.push_back({&held, &w, held.next - count + 1, count, held.waiting.data(), info().given});
  }
  KVASIR_TRY(failed_);
  KVASIR_TRY(take_up(std::move(rows)));
  return follow(wants);
}

// Room for so many more rows, of which the first may be what others have. Where its context ends it begins anew.
bool DraftHead::prepare(Held& held, int64_t rows) {
  held.used = call_;
  if (!held.begun) begin_like_another(held);
  if (int64_t(held.at.size()) + rows > most_rows()) held.at.clear();
  return rows <= most_rows() && reserve(held, int64_t(held.at.size()) + rows);
}

bool DraftHead::reserve(Held& held, int64_t rows) {
  while (int64_t(held.pages.size()) * limits_.page_size < rows) {
    if (free_.empty() && !take_from_another(&held)) return false;
    held.pages.push_back(free_.back());
    free_.pop_back();
  }
  return true;
}

// The pages of whoever was not asked for longest.
bool DraftHead::take_from_another(const Held* keep) {
  auto oldest = held_.end();
  for (auto it = held_.begin(); it != held_.end(); ++it) {
    const Held& h = it->second;
    if (&h == keep || h.pages.empty() || (h.used >= call_ && !h.ended)) continue;
    if (oldest == held_.end() || h.used < oldest->second.used) oldest = it;
  }
  if (oldest == held_.end()) return false;
  Held& held = oldest->second;
  free_.insert(free_.end(), held.pages.begin(), held.pages.end());
  held.pages.clear();
  held.at.clear();
  if (held.ended) held_.erase(oldest);
  return true;
}

// A row is another's, too, where all tokens up to the one behind it are. So many as the model itself had not to
// compute.
void DraftHead::begin_like_another(Held& held) {
  held.begun = true;
  const int64_t first = held.next - waiting(held);  // that the model computed
  if (first == 0 || !held.at.empty()) return;
  const Held* best = nullptr;
  int64_t most = 0;
  for (const auto& [seq, other] : held_) {
    if (&other == &held || other.at.empty()) continue;
    const auto compared = int64_t(std::min({other.tokens.size(), held.tokens.size(), size_t(first) + 1}));
    const int64_t alike =
        std::mismatch(other.tokens.begin(), other.tokens.begin() + compared, held.tokens.begin()).first -
        other.tokens.begin();
    const int64_t rows =
        std::lower_bound(other.at.begin(), other.at.end(), int32_t(std::max<int64_t>(0, alike - 1))) - other.at.begin();
    if (rows > most) most = rows, best = &other;
  }
  if (!best) return;
  // Its pages must not be taken for the copy of them.
  const auto pages = (most + limits_.page_size - 1) / limits_.page_size;
  if (pages > int64_t(free_.size())) return;
  (void)reserve(held, most);
  if (Status copied = copy_rows(*best, most, held); !copied.ok()) failed_ = std::move(copied);
}

Status DraftHead::copy_rows(const Held& from, int64_t rows, Held& to) {
  clear(0, 0);
  batch_.copies.clear();
  for (int64_t done = 0; done < rows; done += limits_.page_size) {
    const auto page = size_t(done / limits_.page_size);
    batch_.copies.push_back(
        {from.pages[page], to.pages[page], int32_t(std::min<int64_t>(limits_.page_size, rows - done)), 0});
  }
  to.at.assign(from.at.begin(), from.at.begin() + rows);
  const Status launched = runner_->launch(batch_, samples_);
  batch_.copies.clear();
  KVASIR_TRY(launched);
  return runner_->wait().status();
}

// In as many steps as it takes; the last row of each sequence draws.
Status DraftHead::take_up(std::vector<Row> rows) {
  while (!rows.empty()) {
    int64_t room = limits_.max_tokens;
    std::vector<Row> now, later;
    for (const Row& r : rows) {
      if (room == 0 || std::ssize(now) == limits_.max_sequences) {
        later.push_back(r);
        continue;
      }
      Row part = r;
      part.count = std::min(r.count, room);
      room -= part.count;
      if (part.count < r.count) {
        part.want = nullptr;
        Row rest = r;
        rest.first += part.count, rest.count -= part.count, rest.given += part.count * r.given_cols;
        later.push_back(rest);
      }
      now.push_back(part);
    }
    // Decodes stand before prompts.
    std::stable_partition(now.begin(), now.end(), [](const Row& r) { return r.count == 1; });
    KVASIR_TRY(step(now));
    for (const Row& r : now) {
      const bool last = std::none_of(later.begin(), later.end(), [&](const Row& l) { return l.held == r.held; });
      for (int64_t i = 0; i < r.count; ++i) r.held->at.push_back(int32_t(r.first + i - 1));
      if (last) r.held->waiting.clear();
    }
    rows = std::move(later);
  }
  return {};
}

// Each further token of a draft goes on with the state of the row before.
Status DraftHead::follow(std::span<Want> wants) {
  std::vector<Row> rows;
  for (;;) {
    rows.clear();
    for (Want& w : wants)
      if (!w.draft.empty() && int(w.draft.size()) < w.count && std::ssize(rows) < limits_.max_sequences)
        rows.push_back({&held_.at(w.seq), &w, -1, 1, state_.at(&w).data(), info().kept});
    if (rows.empty()) return {};
    KVASIR_TRY(step(rows));
  }
}

void DraftHead::clear(size_t sequences, size_t longest) {
  model::Batch& b = batch_;
  ++b.step;
  b.tokens.clear();
  b.positions.clear();
  b.start_pos.clear();
  b.logit_rows.clear();
  b.seqstarts.assign(1, 0);
  b.kvstarts.assign(1, 0);
  b.max_seqlen = b.max_kvlen = b.decoding_batches = 0;
  samples_.clear();
  given_.clear();
  work_ = {};
  starts_.begin(int64_t(sequences), int64_t(longest), (most_rows() + limits_.page_size - 1) / limits_.page_size,
                b.cachestarts);
}

// A draft's rows stand behind those of the cache and are written over by the next ones.
void DraftHead::add(const Row& row) {
  model::Batch& b = batch_;
  const Held& held = *row.held;
  const bool drafted = row.first < 0;
  const int64_t begin = int64_t(held.at.size()) + (drafted ? int64_t(row.want->draft.size()) - 1 : 0);
  const int64_t end = begin + row.count;
  for (int64_t i = 0; i < row.count; ++i) {
    b.tokens.push_back(drafted ? row.want->draft.back() : held.tokens[size_t(row.first + i)]);
    b.positions.push_back(int32_t(begin + i));
  }
  given_.insert(given_.end(), row.given, row.given + row.count * row.given_cols);
  b.given_cols = row.given_cols;
  b.start_pos.push_back(begin);
  b.seqstarts.push_back(b.seqstarts.back() + row.count);
  b.kvstarts.push_back(b.kvstarts.back() + end);
  b.max_seqlen = std::max(b.max_seqlen, row.count);
  b.max_kvlen = std::max(b.max_kvlen, end);
  b.decoding_batches += row.count == 1;
  scheduler::add_work(work_, row.count == 1 ? Phase::decode : Phase::prefill, begin, row.count);
  starts_.add(0, held.pages, end, b.cachestarts);
  if (!row.want) return;
  b.logit_rows.push_back(int32_t(b.tokens.size()) - 1);
  model::SampleRow& sample = samples_.emplace_back();
  sample.params = &greedy_;
  sample.position = end;
}

Status DraftHead::step(std::vector<Row>& rows) {
  size_t longest = 0;
  for (const Row& r : rows) longest = std::max(longest, r.held->pages.size());
  clear(rows.size(), longest);
  for (const Row& r : rows) add(r);
  model::Batch& b = batch_;
  b.max_pages = starts_.row_length();
  kept_.resize(b.tokens.size() * size_t(info().kept));
  b.given = given_.data(), b.kept = kept_.data();
  const auto began = std::chrono::steady_clock::now();
  KVASIR_TRY(runner_->launch(b, samples_));
  KVASIR_ASSIGN(const std::vector<model::Sampled> drawn, runner_->wait());
  work_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  learned_.learn(work_);
  seconds_ += work_.seconds;
  size_t next = 0;
  for (const Row& r : rows) {
    if (!r.want) continue;
    const float* state = kept_.data() + b.logit_rows[next] * info().kept;
    state_[r.want].assign(state, state + info().kept);
    const model::Sampled& s = drawn.at(next++);
    if (s.bad_logits) r.held->off = true;
    if (s.bad_logits || s.token < 0)
      r.want->count = 0;
    else
      r.want->draft.push_back(s.token);
  }
  return {};
}

}  // namespace kvasir::engine
