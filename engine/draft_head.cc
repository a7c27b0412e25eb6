#include "engine/draft_head.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/check.h"

namespace kvasir::engine {

Result<std::unique_ptr<DraftHead>> DraftHead::create(std::unique_ptr<model::Runner> runner, const Limits& limits) {
  KVASIR_CHECK(runner->info().given > 0, "a runner that is no head");
  return make<DraftHead>(std::move(runner), limits);
}

DraftHead::DraftHead(std::unique_ptr<model::Runner> runner, const Limits& limits)
    : CachedDrafter(std::move(runner), limits), places_(size_t(info().places)) {
  std::iota(places_.rbegin(), places_.rend(), 0);
}

Status DraftHead::try_out(std::span<const int32_t> tokens) {
  std::vector<int32_t> places;
  lend_places(std::ssize(tokens) - 1, places);
  see({kMeasured, tokens, 0, places});
  Want want{kMeasured, tokens, 4, {}};
  return draft({&want, 1}, 1);
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

void DraftHead::lend_places(int64_t rows, std::vector<int32_t>& out) {
  out.assign(size_t(rows), -1);
  for (int32_t& place : out) {
    if (places_.empty()) return;
    place = places_.back();
    places_.pop_back();
  }
}

void DraftHead::give_back_places(std::span<const int32_t> places) {
  std::copy_if(places.begin(), places.end(), std::back_inserter(places_), [](int32_t p) { return p >= 0; });
}

void DraftHead::let_go(std::vector<int32_t>& waiting, size_t count) {
  give_back_places({waiting.data(), count});
  waiting.erase(waiting.begin(), waiting.begin() + int64_t(count));
}

// What it has in the cache may be of use to another that begins alike.
void DraftHead::forget(scheduler::SeqId seq) {
  auto it = held_.find(seq);
  if (it == held_.end()) return;
  Held& held = it->second;
  let_go(held.waiting, held.waiting.size());
  if (held.pages.empty()) return void(held_.erase(it));
  held.ended = true;
}

void DraftHead::forget_ended() {
  for (auto& [seq, held] : held_)
    if (held.ended) give_back_pages(held);
  std::erase_if(held_, [](const auto& one) { return one.second.ended; });
}

// A row counts once its own token is no draft any more. One that was computed again (a preemption) is known.
void DraftHead::see(const Seen& rows) {
  if (rows.tokens.empty()) return;  // it has ended
  Held& held = held_[rows.seq];
  if (rows.tokens.size() > held.tokens.size())
    held.tokens.insert(held.tokens.end(), rows.tokens.begin() + int64_t(held.tokens.size()), rows.tokens.end());
  const int64_t end = std::min(rows.begin + std::ssize(rows.places), int64_t(rows.tokens.size()) - 1);
  const int64_t from = std::max(rows.begin, held.next);
  if (held.off || from >= end) return;
  if (rows.begin > held.next) let_go(held.waiting, held.waiting.size());  // nobody has computed what lies between
  held.next = end;
  for (int64_t i = from; i < end; ++i) {
    const int32_t place = std::exchange(rows.places[size_t(i - rows.begin)], -1);
    if (place >= 0)
      held.waiting.push_back(place);
    else
      let_go(held.waiting, held.waiting.size());
  }
}

// Rows of a prompt, and of sequences that were not drafted for lately.
Status DraftHead::catch_up(bool pays) {
  ++call_;
  std::vector<Row> rows;
  for (auto& [seq, held] : held_) {
    const int64_t count = std::ssize(held.waiting);
    if (count < 2 * kWaiting) continue;
    if (pays && prepare(held, count))
      rows.push_back({&held, nullptr, held.first() + 1, count, held.waiting.data()});
    else
      let_go(held.waiting, size_t(count - kWaiting));
  }
  KVASIR_TRY(failed_);
  return take_up(std::move(rows));
}

Status DraftHead::draft(std::span<Want> wants, double /*seconds*/) {
  ++call_;
  std::vector<Row> rows;
  rows.reserve(wants.size());
  for (Want& w : wants) {
    w.draft.clear();
    auto it = held_.find(w.seq);
    if (it == held_.end() || !takes(w.seq, w.tokens)) w.count = 0;
    if (w.count <= 0) continue;
    Held& held = it->second;
    const int64_t count = std::ssize(held.waiting);
    w.count = int(std::min<int64_t>(w.count, most_rows() - count));
    if (w.count <= 0 || !prepare(held, count + w.count - 1)) {
      w.count = 0;
      continue;
    }
    rows.push_back({&held, &w, held.first() + 1, count, held.waiting.data()});
  }
  KVASIR_TRY(failed_);
  KVASIR_TRY(take_up(std::move(rows)));
  KVASIR_TRY(follow(wants));
  for (const auto& [want, place] : state_) places_.push_back(place);
  state_.clear();
  return {};
}

// Room for so many more rows, of which the first may be what others have. Where its context ends it begins anew.
bool DraftHead::prepare(Held& held, int64_t rows) {
  held.used = call_;
  if (!held.begun) begin_like_another(held);
  if (int64_t(held.at.size()) + rows > most_rows()) held.at.clear();
  return rows <= most_rows() && reserve(held, int64_t(held.at.size()) + rows);
}

bool DraftHead::take_from_another() {
  auto oldest = held_.end();
  for (auto it = held_.begin(); it != held_.end(); ++it) {
    const Held& h = it->second;
    if (h.pages.empty() || (h.used >= call_ && !h.ended)) continue;
    if (oldest == held_.end() || h.used < oldest->second.used) oldest = it;
  }
  if (oldest == held_.end()) return false;
  give_back_pages(oldest->second);
  oldest->second.at.clear();
  if (oldest->second.ended) held_.erase(oldest);
  return true;
}

// A row is another's, too, where all tokens up to the one behind it are. So many as the model itself had not to
// compute.
void DraftHead::begin_like_another(Held& held) {
  held.begun = true;
  const int64_t first = held.first();  // that the model computed
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
  begin_step(0, 0);
  for (int64_t done = 0; done < rows; done += limits_.page_size) {
    const auto page = size_t(done / limits_.page_size);
    batch_.copies.push_back(
        {from.pages[page], to.pages[page], int32_t(std::min<int64_t>(limits_.page_size, rows - done)), 0});
  }
  to.at.assign(from.at.begin(), from.at.begin() + rows);
  Status copied = run_step();
  batch_.copies.clear();
  return copied;
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
        rest.first += part.count, rest.count -= part.count, rest.places += part.count;
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
      if (!last) continue;
      if (r.want) {  // its last place has the state that the draft goes on with
        state_[r.want] = r.held->waiting.back();
        r.held->waiting.pop_back();
      }
      let_go(r.held->waiting, r.held->waiting.size());
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
        rows.push_back({&held_.at(w.seq), &w, -1, 1, &state_.at(&w)});
    if (rows.empty()) return {};
    KVASIR_TRY(step(rows));
  }
}

// A draft's rows stand behind those of the cache and are written over by the next ones.
void DraftHead::add(const Row& row) {
  model::Batch& b = batch_;
  Held& held = *row.held;
  const bool drafted = row.first < 0;
  const int64_t begin = std::ssize(held.at) + (drafted ? std::ssize(row.want->draft) - 1 : 0);
  for (int64_t i = 0; i < row.count; ++i)
    b.tokens.push_back(drafted ? row.want->draft.back() : held.tokens[size_t(row.first + i)]);
  b.given_at.insert(b.given_at.end(), row.places, row.places + row.count);
  b.kept_at.resize(b.given_at.size(), -1);
  if (row.want) b.kept_at.back() = b.given_at.back();
  b.given_cols = drafted ? info().kept : info().given;
  add_rows(held, begin, row.count, row.want);
}

Status DraftHead::step(const std::vector<Row>& rows) {
  size_t longest = 0;
  for (const Row& r : rows) longest = std::max(longest, r.held->pages.size());
  begin_step(rows.size(), longest);
  for (const Row& r : rows) add(r);
  return run_step();
}

}  // namespace kvasir::engine
