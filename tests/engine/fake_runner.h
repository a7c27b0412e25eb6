// A network without arithmetic: it keeps each token in the cache slot its page table names, and draws the
// next one from a hash of all the tokens it reads back through the table. So a wrong page, a lost copy or
// a stale slot changes the answer, and the right answer can be said without any engine.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <limits>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "core/check.h"
#include "core/clock.h"
#include "model/runner.h"

namespace kvasir::engine::testing {

constexpr int32_t kVocab = 1000;

inline uint64_t mix(uint64_t h, uint64_t v) {
  h ^= v + 0x9e3779b97f4a7c15ull + (h << 6) + (h >> 2);
  h *= 0xff51afd7ed558ccdull;
  return h ^ (h >> 33);
}

// What follows `tokens`, for the given sampling.
inline int32_t draw_from(std::span<const int32_t> tokens, const model::SamplingParams& p, int32_t choice,
                         const uint32_t* mask = nullptr) {
  uint64_t h = 1;
  for (int32_t t : tokens) h = mix(h, uint64_t(t));
  if (p.temperature > 0) h = mix(mix(h, p.seed), uint64_t(choice));
  auto start = int32_t(h % kVocab);
  for (int32_t i = 0; mask && i < kVocab; ++i) {
    int32_t t = (start + i) % kVocab;
    if (mask[t / 32] >> (t % 32) & 1) return t;
  }
  return start;
}

class FakeRunner final : public model::Runner {
 public:
  struct Script {
    int depth = 1;
    std::chrono::microseconds step{0};          // how long a step takes
    std::chrono::microseconds token{0};         // and each of its tokens
    bool waits = false;                         // for them in wait(), as for a device; else in launch()
    std::function<void(uint64_t step)> before;  // called in launch(), may sleep
    std::atomic<int32_t> poison{-1};            // a sequence that holds this token gets logits that are no numbers
    std::atomic<bool> break_launch{false}, break_wait{false};
    std::atomic<int64_t> launches{0}, most_rows{0}, moves{0};
    std::atomic<int64_t> ahead{0};  // launches while one was in flight
    int32_t context = 4096;
    int32_t vocab = kVocab;
    int32_t off_by = 0;  // of its tokens, from what they should be: a model that knows nothing
    model::Pooling pooling = model::Pooling::last;
    bool encoder = false;
    int64_t state_bytes = 0;  // a sequence: positions are computed once
  };

  FakeRunner(Script& script, int32_t page_size, kvcache::IndexMode mode = kvcache::IndexMode::page_table)
      : script_(script), page_size_(page_size), mode_(mode) {
    info_.name = "fake";
    info_.vocab_size = script.vocab;
    info_.context_length = script.context;
    info_.kv_bytes_per_token = 64;
    info_.hidden = 4;
    info_.pooling.pooling = script.pooling;
    info_.encoder = script.encoder;
    info_.state_bytes = script.state_bytes;
  }
  const model::ModelInfo& info() const override { return info_; }
  int depth() const override { return script_.depth; }
  Status allocate_cache(const model::CachePages& pages) override {
    slots_.assign(size_t(pages.groups.at(0) * page_size_), -1);
    host_.assign(size_t(pages.host * page_size_), -1);
    return {};
  }

  Status launch(const model::Batch& b, std::span<const model::SampleRow> rows) override {
    ++script_.launches;
    script_.ahead += !results_.empty();
    if (script_.before) script_.before(b.step);
    const auto takes = script_.step + script_.token * int64_t(b.tokens.size());
    if (takes.count() && !script_.waits) std::this_thread::sleep_for(takes);
    ready_.push_back(std::max(std::chrono::steady_clock::now(), ready_.empty() ? Time() : ready_.back()) + takes);
    if (script_.break_launch.exchange(false)) {
      ready_.pop_back();
      return internal_error("launch broke");
    }
    KVASIR_CHECK(int64_t(rows.size()) + b.pooled_rows() == int64_t(b.logit_rows.size()));
    script_.most_rows = std::max(script_.most_rows.load(), int64_t(rows.size()));
    for (const auto& m : b.moves) {
      auto device = slots_.begin() + int64_t(m.device) * page_size_,
           host = host_.begin() + int64_t(m.host) * page_size_;
      auto from = m.to_host ? device : host, to = m.to_host ? host : device;
      std::copy(from, from + page_size_, to);
      ++script_.moves;
    }
    for (const auto& c : b.copies)
      for (int32_t t = 0; c.group != kvcache::kStateGroup && t < c.tokens; ++t)
        slots_[size_t(c.to) * size_t(page_size_) + size_t(t)] = slots_[size_t(c.from) * size_t(page_size_) + size_t(t)];
    std::vector<int32_t> tokens = b.tokens;
    for (int32_t& t : tokens)
      if (t < 0) t = previous_[size_t(-1 - t)];
    write(b, tokens);
    std::vector<model::Sampled> out;
    const std::vector<int32_t> before = std::move(previous_);
    previous_.clear();
    for (size_t i = 0; i < rows.size(); ++i) {
      if (rows[i].after >= 0 && (i == 0 || out.back().token != rows[i].after))
        out.emplace_back();  // what it follows did not come
      else
        out.push_back(sample(b, b.logit_rows[i], rows[i], before));
      previous_.push_back(out.back().token);
    }
    size_t row = rows.size();
    for (const model::Batch::Pool& p : b.pools)
      for (int64_t i = 0; i < p.count; ++i) add_hidden(b, b.logit_rows[row++], p.sum);
    results_.push_back(std::move(out));
    return {};
  }

  Result<std::vector<model::Sampled>> wait() override {
    KVASIR_CHECK(!results_.empty());
    auto out = std::move(results_.front());
    results_.pop_front();
    if (script_.waits) std::this_thread::sleep_until(ready_.front());
    ready_.pop_front();
    if (script_.break_wait.exchange(false)) return internal_error("the device fell over");
    return out;
  }

 private:
  size_t slot(const model::Batch& b, int64_t seq, int64_t t) const {
    kvcache::CacheIndex index{mode_, page_size_, b.cachestarts.data(), b.max_pages};
    return size_t(kvcache::physical_token(index, b.kvstarts.data(), seq, t));
  }
  void write(const model::Batch& b, const std::vector<int32_t>& tokens) {
    for (int64_t s = 0; s < b.size(); ++s) {
      int64_t first = b.seqstarts[size_t(s)], count = b.seqstarts[size_t(s) + 1] - first;
      KVASIR_CHECK(b.kvstarts[size_t(s) + 1] - b.kvstarts[size_t(s)] == b.start_pos[size_t(s)] + count);
      if (s < b.decoding_batches) KVASIR_CHECK(count == 1);
      for (int64_t i = 0; i < count; ++i) {
        KVASIR_CHECK(b.positions[size_t(first + i)] == b.start_pos[size_t(s)] + i);
        slots_[slot(b, s, b.start_pos[size_t(s)] + i)] = tokens[size_t(first + i)];
      }
    }
  }
  // The hidden state of a token: itself, where it stands, what would follow it, and 1.
  void add_hidden(const model::Batch& b, int32_t row, float* sum) const {
    const std::vector<int32_t> seen = seen_by(b, row);
    const bool bad = std::find(seen.begin(), seen.end(), script_.poison.load()) != seen.end();
    sum[0] += bad ? std::numeric_limits<float>::quiet_NaN() : float(seen.back());
    sum[1] += float(seen.size());
    sum[2] += float(draw_from(seen, {.temperature = 0}, 0));
    sum[3] += 1;
  }
  std::vector<int32_t> seen_by(const model::Batch& b, int32_t row) const {
    int64_t s = 0;
    while (b.seqstarts[size_t(s) + 1] <= row) ++s;
    std::vector<int32_t> seen;
    for (int64_t t = 0; t <= b.start_pos[size_t(s)] + row - b.seqstarts[size_t(s)]; ++t)
      seen.push_back(slots_[slot(b, s, t)]);
    return seen;
  }
  model::Sampled sample(const model::Batch& b, int32_t row, const model::SampleRow& r,
                        const std::vector<int32_t>& before) const {
    const std::vector<int32_t> seen = seen_by(b, row);
    const auto length = int64_t(seen.size());
    KVASIR_CHECK(r.position == length);
    if (!r.prompt.empty()) {  // the history for the penalties is what the cache holds
      std::vector<int32_t> output(r.output.begin(), r.output.end());
      if (r.last) output.push_back(*r.last < 0 ? before[size_t(-1 - *r.last)] : *r.last);
      KVASIR_CHECK(int64_t(r.prompt.size() + output.size()) == length);
      for (size_t i = 0; i < output.size(); ++i) KVASIR_CHECK(output[i] == seen[r.prompt.size() + i]);
    }
    model::Sampled out;
    int32_t poison = script_.poison;
    for (int32_t t : seen) out.bad_logits |= t == poison;
    out.token = r.score_only ? r.target : draw_from(seen, *r.params, r.choice, r.mask);
    if (r.constraint && !r.constraint->take(out.token, false)) {
      const uint32_t* mask = r.constraint->mask();
      if (!mask && b.wait_for_masks) b.wait_for_masks(), mask = r.constraint->mask();
      out.late = mask == nullptr;
      out.token = out.late ? -1 : draw_from(seen, *r.params, r.choice, mask);
      if (!out.late) KVASIR_CHECK(r.constraint->take(out.token, true));
    }
    if (out.token >= 0) out.token = (out.token + script_.off_by) % kVocab;
    out.logprob = -float(length);
    for (int32_t k = 0; k < r.params->logprobs; ++k) out.top.push_back({k, -float(k)});
    return out;
  }

  Script& script_;
  const int32_t page_size_;
  const kvcache::IndexMode mode_;
  model::ModelInfo info_;
  std::vector<int32_t> slots_, host_, previous_;
  std::deque<std::vector<model::Sampled>> results_;
  std::deque<Time> ready_;  // when they are there
};

}  // namespace kvasir::engine::testing
