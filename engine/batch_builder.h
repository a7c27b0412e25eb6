// A StepPlan becomes one packed Batch in the operator's own terms, and the rows that are to be sampled.
#pragma once

#include <functional>
#include <unordered_map>
#include <vector>

#include "engine/job.h"
#include "kvcache/cache_starts.h"
#include "model/batch.h"
#include "model/pooling.h"
#include "model/sampling.h"
#include "scheduler/scheduler.h"

namespace kvasir::engine {

// What became of a row of logits: a draw of a choice, or the score of a prompt token.
struct RowOwner {
  JobPtr job;
  scheduler::SeqId seq = 0;
  int32_t choice = 0;
  int32_t prompt_position = -1;  // >= 0: the score of the prompt token there
  // Of a verification: the draft token that the next row is computed after, and whether this row is computed after one.
  int32_t draft = -1;
  bool after_draft = false;
  int32_t scored = -1;  // >= 0: this one of the tokens that a request wants scored
};

struct PackedStep {
  model::Batch batch;
  std::vector<model::SampleRow> rows;
  std::vector<RowOwner> owners;                          // of rows
  std::vector<int32_t> pooled_rows;                      // of the batch's pools
  std::vector<std::vector<int32_t>> histories;           // what rows point to, where the scheduler's own may move
  std::unordered_map<scheduler::SeqId, int32_t> row_of;  // the draw of a sequence
  std::vector<JobPtr> jobs;                              // of each sequence
  struct Computed {
    scheduler::SeqId seq = 0;
    int64_t begin = 0, count = 0;  // its rows
  };
  std::vector<Computed> computed;  // of each sequence, where Shape::drafted
  int32_t decodes = 0, prefills = 0;
  bool constrained = false;                  // some row has a grammar
  std::vector<kvcache::CacheStarts> starts;  // of the batch's tables, by layer group
  std::vector<int32_t> seen;                 // a table without its middle
  bool ahead = false;                        // launched while the one before it was in flight
  bool failed = false;
  Time began{}, planned{};
};

class BatchBuilder {
 public:
  struct Shape {
    int32_t page_size = 16;
    kvcache::IndexMode index_mode = kvcache::IndexMode::page_table;
    int64_t most_pages = 0;  // that one sequence can have
    int depth = 1;
    model::Pooling pooling = model::Pooling::last;
    bool encodes = false;    // all of a prompt but its last token is what an encoder reads (ModelInfo::decoder_start)
    bool drafted = false;    // heads read what a step computed (PackedStep::computed)
    bool streaming = false;  // operators are told nothing of what lies between sinks and window
  };
  BatchBuilder(const scheduler::Scheduler& scheduler, const Shape& shape) : scheduler_(scheduler), shape_(shape) {}

  // `before`: the launch just ahead of this one, still in flight, or null. Reuses what `out` holds.
  void pack(const scheduler::StepPlan& plan, const std::function<const JobPtr&(uint64_t request)>& job_of,
            const PackedStep* before, PackedStep& out) const;

 private:
  int64_t cut(const scheduler::PlanItem& item) const {  // tokens that its operators are not told of
    return shape_.streaming ? int64_t(item.cut_end - item.cut_begin) * shape_.page_size : 0;
  }
  void add_tables(const scheduler::StepPlan& plan, PackedStep& out) const;
  void add_rows(const scheduler::PlanItem& item, const JobPtr& job, const PackedStep* before, PackedStep& out) const;
  void add_pool(const scheduler::PlanItem& item, const JobPtr& job, PackedStep& out) const;
  void add_verification(const scheduler::PlanItem& item, const JobPtr& job, PackedStep& out) const;
  // `draft`: its tokens between those that are known and `position`.
  model::SampleRow draw(const Job& job, int32_t choice, scheduler::SeqId seq, int64_t position,
                        std::span<const int32_t> draft, PackedStep& out) const;

  const scheduler::Scheduler& scheduler_;
  const Shape shape_;
};

}  // namespace kvasir::engine
