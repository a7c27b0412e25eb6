#include "engine/batch_builder.h"

#include <algorithm>

#include "core/cat.h"
#include "core/check.h"

namespace kvasir::engine {
namespace {

bool needs_history(const model::SamplingParams& p) {
  return p.repetition_penalty != 1.0f || p.presence_penalty != 0.0f || p.frequency_penalty != 0.0f ||
         !p.bad_sequences.empty();
}

void clear(PackedStep& s) {
  s.batch.tokens.clear();
  s.batch.positions.clear();
  s.batch.seqstarts.assign(1, 0);
  s.batch.kvstarts.assign(1, 0);
  s.batch.start_pos.clear();
  s.batch.logit_rows.clear();
  s.batch.pools.clear();
  s.batch.adapters.clear();
  s.batch.types.clear();
  s.batch.sources.clear();
  s.batch.states.clear();
  s.pooled_rows.clear();
  s.batch.wait_for_masks = nullptr;
  s.batch.max_pages = s.batch.max_seqlen = s.batch.max_kvlen = 0;
  s.rows.clear();
  s.owners.clear();
  s.histories.clear();
  s.row_of.clear();
  s.jobs.clear();
  s.computed.clear();
  s.batch.kept_at.clear();
  s.failed = s.constrained = false;
  s.decodes = s.prefills = 0;
}

// Those of a pair's second text are 1; nobody reads them where all are 0.
void add_types(const scheduler::PlanItem& item, const Job& job, model::Batch& b) {
  const int64_t second = job.request.second_text;
  if (second == 0 && b.types.empty()) return;
  b.types.resize(b.tokens.size(), 0);
  for (int32_t t = 0; second > 0 && t < item.count; ++t)
    b.types[b.types.size() - size_t(item.count - t)] = item.begin + t >= second ? 1 : 0;
}

// Nobody looks for adapters where no sequence has one.
void add_adapter(const Job& job, model::Batch& b) {
  if (!job.adapter && b.adapters.empty()) return;
  b.adapters.resize(size_t(b.size()), nullptr);
  if (job.adapter) b.adapters.back() = job.adapter->adapter.get();
}

}  // namespace

void BatchBuilder::pack(const scheduler::StepPlan& plan, const std::function<const JobPtr&(uint64_t)>& job_of,
                        const PackedStep* before, PackedStep& out) const {
  clear(out);
  model::Batch& b = out.batch;
  b.step = plan.step;
  b.decoding_batches = plan.decoding_batches;
  b.moves = plan.moves;
  b.copies = plan.copies;
  add_tables(plan, out);
  for (const scheduler::PlanItem& item : plan.items) {
    b.tokens.insert(b.tokens.end(), item.tokens.begin(), item.tokens.end());
    if (item.awaits_token) {
      KVASIR_CHECK(before != nullptr, "sequence ", item.seq, " awaits a token and nothing is in flight");
      auto row = before->row_of.find(item.seq);
      KVASIR_CHECK(row != before->row_of.end(), "sequence ", item.seq, " awaits a token nobody draws");
      b.tokens.push_back(model::previous_sample(row->second));
    }
    const int64_t begin = item.begin - cut(item), kvlen = begin + item.count;
    for (int32_t t = 0; t < item.count; ++t) b.positions.push_back(int32_t(begin) + t);
    b.start_pos.push_back(begin);
    b.seqstarts.push_back(b.seqstarts.back() + item.count);
    b.kvstarts.push_back(b.kvstarts.back() + kvlen);
    b.max_seqlen = std::max<int64_t>(b.max_seqlen, item.count);
    b.max_kvlen = std::max(b.max_kvlen, kvlen);
    ++(item.phase == scheduler::Phase::prefill ? out.prefills : out.decodes);
    const JobPtr& job = job_of(item.request);
    if (item.state >= 0) b.states.push_back(item.state);
    if (shape_.encodes) b.sources.push_back(int64_t(job->request.prompt.size()) - 1);
    out.jobs.push_back(job);
    if (shape_.drafted) out.computed.push_back({item.seq, item.begin, item.count});
    add_rows(item, job, before, out);
    add_types(item, *job, b);
    add_adapter(*job, b);
    KVASIR_CHECK(int64_t(b.tokens.size()) == b.seqstarts.back(), "sequence ", item.seq, " gave ", item.tokens.size(),
                 " tokens for a count of ", item.count);
  }
  b.logit_rows.insert(b.logit_rows.end(), out.pooled_rows.begin(), out.pooled_rows.end());
}

void BatchBuilder::add_tables(const scheduler::StepPlan& plan, PackedStep& out) const {
  model::Batch& b = out.batch;
  const size_t groups = plan.items.empty() ? 1 : 1 + plan.items[0].more_pages.size();
  while (out.starts.size() < groups) out.starts.emplace_back(shape_.index_mode, shape_.page_size);
  b.more_cachestarts.resize(out.starts.size() - 1);
  size_t longest = 0;
  for (const scheduler::PlanItem& item : plan.items)
    longest = std::max(longest, item.pages.size() - (shape_.streaming ? size_t(item.cut_end - item.cut_begin) : 0));
  for (size_t g = 0; g < out.starts.size(); ++g) {
    std::vector<int64_t>& starts = g == 0 ? b.cachestarts : b.more_cachestarts[g - 1];
    out.starts[g].begin(int64_t(plan.items.size()), int64_t(longest), shape_.most_pages, starts);
    for (const scheduler::PlanItem& item : plan.items) {
      std::span<const int32_t> pages = g == 0 ? item.pages : item.more_pages[g - 1];
      const int64_t kvlen = item.begin + item.count;
      if (shape_.streaming) {  // a table that loses its middle is another one
        out.seen.assign(pages.begin(), pages.begin() + std::min<size_t>(size_t(item.cut_begin), pages.size()));
        out.seen.insert(out.seen.end(), pages.begin() + std::min<size_t>(size_t(item.cut_end), pages.size()),
                        pages.end());
        out.starts[g].add(0, out.seen, kvlen - cut(item), starts);
      } else {
        out.starts[g].add(item.table_version, pages, kvlen, starts);
      }
    }
  }
  b.max_pages = out.starts[0].row_length();
}

void BatchBuilder::add_rows(const scheduler::PlanItem& item, const JobPtr& job, const PackedStep* before,
                            PackedStep& out) const {
  if (job->request.pooled) return add_pool(item, job, out);
  int32_t first = int32_t(out.batch.seqstarts.back()) - item.count;  // row of its first token
  const auto& prompt = job->request.prompt;
  if (job->request.prompt_logprobs >= 0 && !job->started) {  // after a preemption they are there already
    for (int32_t t = 0; t < item.count; ++t) {
      int64_t target = item.begin + t + 1;
      if (target >= int64_t(prompt.size())) break;
      model::SampleRow row;
      row.params = &job->score_params;
      row.position = target;
      row.score_only = true;
      row.target = prompt[size_t(target)];
      out.batch.logit_rows.push_back(first + t);
      out.rows.push_back(row);
      out.owners.push_back({job, item.seq, item.choice, int32_t(target)});
    }
  }
  if (!item.samples) return;
  if (item.phase == scheduler::Phase::verify) return add_verification(item, job, out);
  int64_t position = item.begin + item.count;
  for (int32_t d = 0; d < item.draws; ++d) {
    scheduler::SeqId seq = item.seq + scheduler::SeqId(d);
    out.row_of[seq] = int32_t(out.rows.size());
    out.batch.logit_rows.push_back(first + item.count - 1);
    out.rows.push_back(draw(*job, item.choice + d, seq, position, {}, out));
    if (item.awaits_token && needs_history(job->request.sampling))
      out.rows.back().last = model::previous_sample(before->row_of.at(seq));
    out.owners.push_back({job, seq, item.choice + d});
  }
}

// What this chunk gives of the prompt as a whole. After a preemption some of it is there already.
void BatchBuilder::add_pool(const scheduler::PlanItem& item, const JobPtr& job, PackedStep& out) const {
  const Request& r = job->request;
  const int32_t first = int32_t(out.batch.seqstarts.back()) - item.count;
  const int64_t prompt = int64_t(r.prompt.size()), end = item.begin + item.count;
  const bool ends = end >= prompt && job->pooled_to < prompt;
  for (size_t i = 0; ends && i < r.scored.size(); ++i) {
    model::SampleRow row;
    row.params = &job->score_params;
    row.position = prompt;
    row.score_only = true;
    row.target = r.scored[i];
    out.batch.logit_rows.push_back(first + item.count - 1);
    out.rows.push_back(row);
    out.owners.push_back({job, item.seq, item.choice});
    out.owners.back().scored = int32_t(i);
  }
  if (!r.scored.empty()) {
    if (ends) job->pooled_to = prompt;
    return;
  }
  const auto how = r.classified ? model::Pooling::cls : shape_.pooling;
  const int64_t wanted = how == model::Pooling::last ? prompt - 1 : 0;
  const int64_t to = std::min(end, how == model::Pooling::cls ? 1 : prompt);
  const int64_t from = std::max({item.begin, wanted, job->pooled_to});
  if (from >= to) return;
  out.batch.pools.push_back({to - from, job->pooled.data()});
  for (int64_t t = from; t < to; ++t) out.pooled_rows.push_back(first + int32_t(t - item.begin));
  job->pooled_to = to;
  job->pooled_rows += to - from;
}

// A known token and a draft: each row draws what follows its token, as if the draft up to there were known.
void BatchBuilder::add_verification(const scheduler::PlanItem& item, const JobPtr& job, PackedStep& out) const {
  const int32_t first = int32_t(out.batch.seqstarts.back()) - item.count;
  for (int32_t t = 0; t < item.count; ++t) {
    out.batch.logit_rows.push_back(first + t);
    out.rows.push_back(draw(*job, item.choice, item.seq, item.begin + t + 1, item.tokens.subspan(1, size_t(t)), out));
    if (t > 0 && out.rows.back().constraint) out.rows.back().after = item.tokens[size_t(t)];
    out.owners.push_back({job, item.seq, item.choice});
    RowOwner& owner = out.owners.back();
    if (t + 1 < item.count) owner.draft = item.tokens[size_t(t) + 1];
    owner.after_draft = t > 0;
  }
}

model::SampleRow BatchBuilder::draw(const Job& job, int32_t choice, scheduler::SeqId seq, int64_t position,
                                    std::span<const int32_t> draft, PackedStep& out) const {
  const Request& request = job.request;
  model::SampleRow row;
  row.params = job.beams ? &job.beam_params : &request.sampling;
  row.choice = choice;
  row.position = position;
  int64_t drawn = position - int64_t(request.prompt.size());  // tokens this choice has
  if (needs_history(request.sampling)) {
    row.prompt = request.prompt;
    if (shape_.encodes) row.prompt = row.prompt.last(1);  // the answer repeats no token that its own side lacks
    auto tokens = scheduler_.tokens(seq);
    if (tokens.size() > request.prompt.size()) row.output = tokens.subspan(request.prompt.size());
    if (shape_.depth > 1 || !draft.empty()) {
      out.histories.emplace_back(row.output.begin(), row.output.end());
      out.histories.back().insert(out.histories.back().end(), draft.begin(), draft.end());
      row.output = out.histories.back();
    }
  }
  ChoiceGrammar* grammar = job.choices[size_t(choice)].grammar.get();
  if (grammar && !grammar->indifferent()) {
    row.constraint = grammar;
    out.constrained = true;
    if (!job.allowed_mask.empty()) row.mask = job.allowed_mask.data();
  } else if (drawn < request.min_tokens && !job.min_tokens_mask.empty()) {
    row.mask = job.min_tokens_mask.data();
  } else if (!job.allowed_mask.empty()) {
    row.mask = job.allowed_mask.data();
  }
  return row;
}

}  // namespace kvasir::engine
