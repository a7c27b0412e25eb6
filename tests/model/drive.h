// Drives a Runner by hand: sequences with their own pages, fed in any pieces and company.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <deque>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "model/runner.h"

namespace kvasir::model {

inline std::string smollm2() {
  const char* home = std::getenv("HOME");
  std::string path = std::string(home ? home : "") + "/.cache/kvasir/models/SmolLM2-135M-Instruct.Q4_1.gguf";
  return std::filesystem::exists(path) ? path : "";
}

inline nlohmann::json fixture(const std::string& name) {
  std::ifstream in("tests/model/fixtures/" + name);
  EXPECT_TRUE(in.good()) << name;
  return nlohmann::json::parse(in);
}

struct Piece {  // `tokens` new ones of sequence `seq`, from position `begin`
  int seq;
  int64_t begin;
  std::vector<int32_t> tokens;
  bool every = false;  // sample each token's logits, not only the last's
  const Adapter* adapter = nullptr;
  int64_t source = 0;  // of an encoder-decoder: the first tokens of `seq`, which its encoder reads
};

class Drive {
 public:
  Drive(const std::string& model, int threads, bool precise = false, int64_t length = 2048, int sequences = 1,
        int64_t max_tokens = 2048)
      : Drive(options(model, threads, precise), length, sequences, max_tokens) {}
  // Of `o` the model and how it runs; its limits are the other arguments.
  Drive(RunnerOptions o, int64_t length, int sequences, int64_t max_tokens) : pages_((length + kPage - 1) / kPage) {
    o.page_size = kPage;
    o.max_batch = std::max(sequences, 16);
    o.max_tokens = max_tokens;
    o.max_kvlen = length;
    auto loaded = load_runner(o);
    EXPECT_TRUE(loaded.ok()) << loaded.status().to_string();
    runner = std::move(loaded).value();
    CachePages all = pages_ * sequences;
    if (runner->info().state_bytes > 0) all.states = sequences;
    EXPECT_TRUE(runner->allocate_cache(all).ok());
  }

  // Pages are handed out backwards, so that nothing works by being contiguous.
  int64_t page(int seq, int64_t i) const {
    const auto hit = prefixes_.find(seq);
    if (hit != prefixes_.end() && i < hit->second.second) seq = hit->second.first;
    return (int64_t(seq) + 1) * pages_ - 1 - i;
  }
  // A prefix hit: the first `pages` of `seq` are those of `owner`.
  void share(int seq, int owner, int64_t pages) { prefixes_[seq] = {owner, pages}; }

  // Pieces in packed order (decodes first). One result a sampled row.
  std::vector<Sampled> step(const std::vector<Piece>& pieces, const SamplingParams& params = greedy(),
                            const std::vector<int32_t>& targets = {}) {
    launch(pieces, params, targets);
    return wait();
  }
  // A token below 0 is previous_sample() of the launch before. What `params` points to lives until wait().
  void launch(const std::vector<Piece>& pieces, const SamplingParams& params, const std::vector<int32_t>& targets = {},
              const std::vector<SampleRow>& like = {}) {
    Batch& b = *launched_.emplace_back(std::make_unique<Batch>());
    b.seqstarts = {0};
    b.kvstarts = {0};
    for (const Piece& p : pieces)
      b.max_pages = std::max(b.max_pages, (p.begin + int64_t(p.tokens.size()) + kPage - 1) / kPage);
    for (const Piece& p : pieces) {
      int64_t n = int64_t(p.tokens.size()), kv = p.begin + n;
      for (int64_t i = 0; i < n; ++i) {
        if (p.begin + i >= p.source && (p.every || i + 1 == n)) b.logit_rows.push_back(int32_t(b.tokens.size()));
        b.tokens.push_back(p.tokens[size_t(i)]);
        b.positions.push_back(int32_t(p.begin + i));
      }
      b.seqstarts.push_back(int64_t(b.tokens.size()));
      b.kvstarts.push_back(b.kvstarts.back() + kv);
      b.start_pos.push_back(p.begin);
      b.adapters.push_back(p.adapter);
      if (p.source > 0) b.sources.push_back(p.source);
      if (runner->info().state_bytes > 0) b.states.push_back(p.seq);
      for (int64_t i = 0; i < b.max_pages; ++i) b.cachestarts.push_back(i * kPage < kv ? page(p.seq, i) * kPage : 0);
      b.decoding_batches += n == 1 && b.decoding_batches == b.size() - 1;
      b.max_seqlen = std::max(b.max_seqlen, n);
      b.max_kvlen = std::max(b.max_kvlen, kv);
    }
    std::vector<SampleRow> rows = like;
    rows.resize(b.logit_rows.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      if (!rows[i].params) rows[i].params = &params;
      rows[i].position = b.positions[size_t(b.logit_rows[i])] + 1;
      if (i < targets.size()) rows[i].score_only = true, rows[i].target = targets[i];
    }
    Status s = runner->launch(b, rows);
    EXPECT_TRUE(s.ok()) << s.to_string();
  }
  std::vector<Sampled> wait() {
    auto out = runner->wait();
    EXPECT_TRUE(out.ok());
    launched_.pop_front();
    return std::move(out).value();
  }

  static SamplingParams greedy() {
    SamplingParams p;
    p.temperature = 0;
    p.logprobs = 2;
    return p;
  }

  static constexpr int64_t kPage = 16;
  std::unique_ptr<Runner> runner;

 private:
  static RunnerOptions options(const std::string& model, int threads, bool precise) {
    RunnerOptions o;
    o.model = model, o.threads = threads, o.precise = precise;
    return o;
  }

  int64_t pages_;
  std::deque<std::unique_ptr<Batch>> launched_;
  std::map<int, std::pair<int, int64_t>> prefixes_;
};

}  // namespace kvasir::model
