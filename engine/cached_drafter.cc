#include "engine/cached_drafter.h"

#include <algorithm>
#include <chrono>
#include <numeric>

namespace kvasir::engine {

using scheduler::Phase;

CachedDrafter::CachedDrafter(std::unique_ptr<model::Runner> runner, const Limits& limits)
    : runner_(std::move(runner)),
      limits_(limits),
      learned_(scheduler::StepCost()),
      free_(size_t(limits.pages)),
      starts_(kvcache::IndexMode::page_table, limits.page_size) {
  std::iota(free_.rbegin(), free_.rend(), 0);
  greedy_.temperature = 0;
}

Status CachedDrafter::measure() {
  const int64_t most = most_rows() - 5;
  for (int64_t length : {2, 3, 16, 2, 16}) {
    const std::vector<int32_t> tokens(size_t(std::min(length, std::max<int64_t>(1, most))), 0);
    KVASIR_TRY(try_out(tokens));
    forget(kMeasured);
    forget_ended();
  }
  seconds_ = 0;
  return {};
}

int64_t CachedDrafter::most_rows() const {
  return std::min<int64_t>(info().context_length, limits_.pages * limits_.page_size);
}

double CachedDrafter::token_us(int64_t context, double sequences) const {
  const scheduler::StepCost& c = learned_.cost();
  return c.fixed_us / sequences + c.decode_token_us + c.decode_context_us * double(context);
}

double CachedDrafter::prefill_us(int64_t begin, int64_t count) const {
  scheduler::StepTime work;
  if (count > 0) scheduler::add_work(work, Phase::prefill, begin, count);
  return 1e6 * scheduler::step_seconds(work, learned_.cost()) - learned_.cost().fixed_us;
}

bool CachedDrafter::reserve(HeldPages& to, int64_t rows) {
  while (int64_t(to.pages.size()) * limits_.page_size < rows) {
    if (free_.empty() && !take_from_another()) return false;
    to.pages.push_back(free_.back());
    free_.pop_back();
  }
  return true;
}

void CachedDrafter::give_back_pages(HeldPages& of) {
  free_.insert(free_.end(), of.pages.begin(), of.pages.end());
  of.pages.clear();
}

void CachedDrafter::begin_step(size_t sequences, size_t longest) {
  model::Batch& b = batch_;
  ++b.step;
  b.tokens.clear();
  b.positions.clear();
  b.start_pos.clear();
  b.logit_rows.clear();
  b.given_at.clear();
  b.kept_at.clear();
  b.seqstarts.assign(1, 0);
  b.kvstarts.assign(1, 0);
  b.max_seqlen = b.max_kvlen = b.decoding_batches = 0;
  samples_.clear();
  drawing_.clear();
  work_ = {};
  starts_.begin(int64_t(sequences), int64_t(longest), (most_rows() + limits_.page_size - 1) / limits_.page_size,
                b.cachestarts);
  b.max_pages = starts_.row_length();
}

void CachedDrafter::add_rows(HeldPages& of, int64_t begin, int64_t count, Want* draws) {
  model::Batch& b = batch_;
  const int64_t end = begin + count;
  for (int64_t i = begin; i < end; ++i) b.positions.push_back(int32_t(i));
  b.start_pos.push_back(begin);
  b.seqstarts.push_back(b.seqstarts.back() + count);
  b.kvstarts.push_back(b.kvstarts.back() + end);
  b.max_seqlen = std::max(b.max_seqlen, count);
  b.max_kvlen = std::max(b.max_kvlen, end);
  b.decoding_batches += count == 1;
  scheduler::add_work(work_, count == 1 ? Phase::decode : Phase::prefill, begin, count);
  starts_.add(0, of.pages, end, b.cachestarts);
  if (!draws) return;
  b.logit_rows.push_back(int32_t(b.tokens.size()) - 1);
  drawing_.emplace_back(draws, &of);
  model::SampleRow& sample = samples_.emplace_back();
  sample.params = &greedy_;
  sample.position = end;
}

Status CachedDrafter::run_step() {
  const auto began = std::chrono::steady_clock::now();
  KVASIR_TRY(runner_->launch(batch_, samples_));
  KVASIR_ASSIGN(const std::vector<model::Sampled> drawn, runner_->wait());
  work_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  if (!batch_.tokens.empty()) learned_.learn(work_);
  seconds_ += work_.seconds;
  for (size_t i = 0; i < drawing_.size(); ++i) {
    auto [want, of] = drawing_[i];
    const model::Sampled& s = drawn.at(i);
    if (s.bad_logits) of->off = true;
    if (s.bad_logits || s.token < 0 || s.token >= limits_.vocab)
      want->count = 0;
    else
      want->draft.push_back(s.token);
  }
  return {};
}

}  // namespace kvasir::engine
