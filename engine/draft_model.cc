#include "engine/draft_model.h"

#include <algorithm>
#include <chrono>
#include <numeric>

#include "core/cat.h"
#include "core/check.h"

namespace kvasir::engine {
namespace {

using scheduler::Phase;

constexpr int64_t kFew = 16;                                  // tokens that are prefilled whatever time there is
constexpr scheduler::SeqId kMeasured = ~scheduler::SeqId(0);  // no sequence's

}  // namespace

Result<std::unique_ptr<DraftModel>> DraftModel::create(std::unique_ptr<model::Runner> runner, const Limits& limits) {
  KVASIR_TRY(runner->allocate_cache(limits.pages));
  std::unique_ptr<DraftModel> made(new DraftModel(std::move(runner), limits));
  KVASIR_TRY(made->measure());
  return made;
}

DraftModel::DraftModel(std::unique_ptr<model::Runner> runner, const Limits& limits)
    : runner_(std::move(runner)),
      limits_(limits),
      learned_(scheduler::StepCost()),
      free_(size_t(limits.pages)),
      starts_(kvcache::IndexMode::page_table, limits.page_size) {
  std::iota(free_.rbegin(), free_.rend(), 0);
  greedy_.temperature = 0;
}

// What a step takes is not known of this model, and whether it pays is known only then.
Status DraftModel::measure() {
  const int64_t room = std::min<int64_t>(limits_.pages * limits_.page_size, info().context_length) - 5;
  for (int64_t length : {1, 2, 16, 1, 16}) {
    const std::vector<int32_t> tokens(size_t(std::min(length, std::max<int64_t>(1, room))), 0);
    Want want{kMeasured, tokens, 4, {}};
    KVASIR_TRY(draft({&want, 1}, 1));
    forget(kMeasured);
  }
  seconds_ = 0;
  return {};
}

bool DraftModel::takes(scheduler::SeqId seq, std::span<const int32_t> tokens) const {
  if (int64_t(tokens.size()) + 1 > std::min<int64_t>(info().context_length, limits_.pages * limits_.page_size))
    return false;
  auto it = held_.find(seq);
  return it == held_.end() || !it->second.off;
}

int64_t DraftModel::lacks(scheduler::SeqId seq, std::span<const int32_t> tokens) const {
  auto it = held_.find(seq);
  const size_t there = it == held_.end() ? 0 : std::min(it->second.tokens.size(), tokens.size() - 1);
  return int64_t(tokens.size() - 1 - there);
}

double DraftModel::token_us(int64_t context, double sequences) const {
  const scheduler::StepCost& c = learned_.cost();
  return c.fixed_us / sequences + c.decode_token_us + c.decode_context_us * double(context);
}

double DraftModel::prefill_us(int64_t begin, int64_t count) const {
  scheduler::StepTime work;
  if (count > 0) scheduler::add_work(work, Phase::prefill, begin, count);
  return 1e6 * scheduler::step_seconds(work, learned_.cost()) - learned_.cost().fixed_us;
}

void DraftModel::forget(scheduler::SeqId seq) {
  auto it = held_.find(seq);
  if (it == held_.end()) return;
  free_.insert(free_.end(), it->second.pages.begin(), it->second.pages.end());
  held_.erase(it);
}

Status DraftModel::draft(std::span<Want> wants, double seconds) {
  ++call_;
  for (Want& w : wants) w.draft.clear();
  for (bool first = true;; first = false) {
    gather(wants, first, seconds);
    if (rows_.empty()) return {};
    KVASIR_TRY(step());
  }
}

// What the cache has of a sequence, as far as it still is so, with room for its draft. Null: no draft.
DraftModel::Held* DraftModel::prepare(Want& want) {
  const int64_t most = std::min<int64_t>(info().context_length, limits_.pages * limits_.page_size);
  want.count = int(std::min<int64_t>(want.count, most - int64_t(want.tokens.size())));
  if (want.count <= 0) return nullptr;
  Held& held = held_[want.seq];
  held.used = call_;
  if (held.off) return nullptr;
  const size_t compared = std::min(held.tokens.size(), want.tokens.size() - 1);
  const auto known = int64_t(std::min(held.known, compared));
  const auto differs =
      std::mismatch(held.tokens.begin() + known, held.tokens.begin() + int64_t(compared), want.tokens.begin() + known);
  held.known = size_t(differs.first - held.tokens.begin());
  held.tokens.resize(held.known);
  held.off = std::any_of(want.tokens.begin() + int64_t(held.known), want.tokens.end(),
                         [&](int32_t t) { return t >= info().vocab_size; });
  if (held.off || !reserve(held, int64_t(want.tokens.size()) + want.count - 1)) return nullptr;
  return &held;
}

bool DraftModel::reserve(Held& held, int64_t tokens) {
  while (int64_t(held.pages.size()) * limits_.page_size < tokens) {
    if (free_.empty() && !take_from_another()) return false;
    held.pages.push_back(free_.back());
    free_.pop_back();
  }
  return true;
}

// The pages of whoever was not asked for longest; what it had is prefilled again when it is.
bool DraftModel::take_from_another() {
  Held* oldest = nullptr;
  for (auto& [seq, held] : held_)
    if (held.used < call_ && !held.pages.empty() && (!oldest || held.used < oldest->used)) oldest = &held;
  if (!oldest) return false;
  free_.insert(free_.end(), oldest->pages.begin(), oldest->pages.end());
  oldest->pages.clear();
  oldest->tokens.clear();
  oldest->known = 0;
  return true;
}

// The first step prefills what is lacking, as far as there is time; those that follow are one token each.
void DraftModel::gather(std::span<Want> wants, bool first, double seconds) {
  rows_.clear();
  int64_t room = limits_.max_tokens;
  for (Want& w : wants) {
    if (int(w.draft.size()) >= w.count) continue;
    Held* held = first ? prepare(w) : &held_.at(w.seq);
    if (!held) {
      w.count = 0;
      continue;
    }
    rows_.push_back({&w, held, int64_t(w.tokens.size() + w.draft.size() - held->tokens.size()), true});
  }
  // Decodes stand before prompts.
  std::stable_partition(rows_.begin(), rows_.end(), [](const DraftRow& r) { return r.count == 1; });
  bool some = false;
  for (DraftRow& r : rows_) {
    if (r.count > kFew) {
      const int64_t in_time =
          int64_t(scheduler::prompt_tokens_in(seconds, int64_t(r.held->tokens.size()), learned_.cost()));
      const int64_t most = std::min(room, some ? in_time : std::max<int64_t>(in_time, limits_.page_size));
      some = true;
      r.samples = r.count <= most;
      r.count = std::min(r.count, most);
      seconds -= 1e-6 * prefill_us(int64_t(r.held->tokens.size()), r.count);
    } else if (r.count > room) {
      r.samples = false, r.count = 0;
    }
    room -= r.count;
    if (!r.samples) r.want->count = 0;
  }
  std::erase_if(rows_, [](const DraftRow& r) { return r.count <= 0; });
  std::stable_partition(rows_.begin(), rows_.end(), [](const DraftRow& r) { return r.count == 1; });
}

void DraftModel::add(const DraftRow& row) {
  model::Batch& b = batch_;
  Held& held = *row.held;
  const auto begin = int64_t(held.tokens.size()), end = begin + row.count;
  for (int64_t i = begin; i < end; ++i) {
    const auto& [tokens, draft] = std::pair(row.want->tokens, std::span<const int32_t>(row.want->draft));
    const int32_t token = size_t(i) < tokens.size() ? tokens[size_t(i)] : draft[size_t(i) - tokens.size()];
    b.tokens.push_back(token);
    b.positions.push_back(int32_t(i));
    held.tokens.push_back(token);
  }
  b.start_pos.push_back(begin);
  b.seqstarts.push_back(b.seqstarts.back() + row.count);
  b.kvstarts.push_back(b.kvstarts.back() + end);
  b.max_seqlen = std::max(b.max_seqlen, row.count);
  b.max_kvlen = std::max(b.max_kvlen, end);
  b.decoding_batches += row.count == 1;
  scheduler::add_work(work_, row.count == 1 ? Phase::decode : Phase::prefill, begin, row.count);
  starts_.add(0, held.pages, end, b.cachestarts);
  if (!row.samples) return;
  b.logit_rows.push_back(int32_t(b.tokens.size()) - 1);
  model::SampleRow& sample = samples_.emplace_back();
  sample.params = &greedy_;
  sample.position = end;
}

void DraftModel::pack() {
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
  work_ = {};
  size_t longest = 0;
  for (const DraftRow& r : rows_) longest = std::max(longest, r.held->pages.size());
  starts_.begin(int64_t(rows_.size()), int64_t(longest),
                (info().context_length + limits_.page_size - 1) / limits_.page_size, b.cachestarts);
  for (const DraftRow& r : rows_) add(r);
  b.max_pages = starts_.row_length();
}

Status DraftModel::step() {
  pack();
  const auto began = std::chrono::steady_clock::now();
  KVASIR_TRY(runner_->launch(batch_, samples_));
  KVASIR_ASSIGN(const std::vector<model::Sampled> drawn, runner_->wait());
  work_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  learned_.learn(work_);
  seconds_ += work_.seconds;
  size_t next = 0;
  for (const DraftRow& r : rows_) {
    if (!r.samples) continue;
    const model::Sampled& s = drawn.at(next++);
    if (s.bad_logits) r.held->off = true;
    if (s.bad_logits || s.token < 0 || s.token >= limits_.vocab)
      r.want->count = 0;
    else
      r.want->draft.push_back(s.token);
  }
  return {};
}

Status same_vocabulary(const Vocabulary& model, const Vocabulary& draft) {
  auto refuse = [&](const std::string& why) {
    return invalid_argument(cat("draft_model is ", draft.model, ", whose vocabulary is not that of ", model.model, ": ",
                                why, "; a draft model's tokens must be the model's own: take one of the same family"))
        .with_field("draft_model");
  };
  const bool dummy = model.model.starts_with("dummy:") || draft.model.starts_with("dummy:");
  if (dummy || !model.tokenizer || !draft.tokenizer) {
    if (model.size == draft.size) return {};
    return refuse(cat("it has ", draft.size, " tokens, the model ", model.size));
  }
  const int32_t size = model.tokenizer->vocab_size(), other = draft.tokenizer->vocab_size();
  if (size != other) return refuse(cat("it has ", other, " tokens, the model ", size));
  for (int32_t id = 0; id < size; ++id) {
    const std::string one = model.tokenizer->token_text(id), two = draft.tokenizer->token_text(id);
    if (one != two) return refuse(cat("token ", id, " is '", two, "', the model's is '", one, "'"));
  }
  return {};
}

}  // namespace kvasir::engine
