#include "engine/draft_model.h"

#include <algorithm>

#include "core/cat.h"
#include "core/check.h"

namespace kvasir::engine {
namespace {

constexpr int64_t kFew = 16;  // tokens that are prefilled whatever time there is

}  // namespace

Status DraftModel::try_out(std::span<const int32_t> tokens) {
  Want want{kMeasured, tokens, 4, {}};
  return draft({&want, 1}, 1);
}

bool DraftModel::takes(scheduler::SeqId seq, std::span<const int32_t> tokens) const {
  if (int64_t(tokens.size()) + 1 > most_rows()) return false;
  auto it = held_.find(seq);
  return it == held_.end() || !it->second.off;
}

int64_t DraftModel::lacks(scheduler::SeqId seq, std::span<const int32_t> tokens) const {
  auto it = held_.find(seq);
  const size_t there = it == held_.end() ? 0 : std::min(it->second.tokens.size(), tokens.size() - 1);
  return int64_t(tokens.size() - 1 - there);
}

void DraftModel::forget(scheduler::SeqId seq) {
  auto it = held_.find(seq);
  if (it == held_.end()) return;
  give_back_pages(it->second);
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
  want.count = int(std::min<int64_t>(want.count, most_rows() - int64_t(want.tokens.size())));
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

// What it had is prefilled again when it is asked for.
bool DraftModel::take_from_another() {
  Held* oldest = nullptr;
  for (auto& [seq, held] : held_)
    if (held.used < call_ && !held.pages.empty() && (!oldest || held.used < oldest->used)) oldest = &held;
  if (!oldest) return false;
  give_back_pages(*oldest);
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
  Held& held = *row.held;
  const auto begin = int64_t(held.tokens.size());
  for (int64_t i = begin; i < begin + row.count; ++i) {
    const auto& [tokens, draft] = std::pair(row.want->tokens, std::span<const int32_t>(row.want->draft));
    const int32_t token = size_t(i) < tokens.size() ? tokens[size_t(i)] : draft[size_t(i) - tokens.size()];
    batch_.tokens.push_back(token);
    held.tokens.push_back(token);
  }
  add_rows(held, begin, row.count, row.samples ? row.want : nullptr);
}

Status DraftModel::step() {
  size_t longest = 0;
  for (const DraftRow& r : rows_) longest = std::max(longest, r.held->pages.size());
  begin_step(rows_.size(), longest);
  for (const DraftRow& r : rows_) add(r);
  return run_step();
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
