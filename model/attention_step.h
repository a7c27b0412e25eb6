// What operators are told of a batch, and of what batches there can be: the same on every device.
#pragma once

#include "attention/backend.h"
#include "model/batch.h"

namespace kvasir::model {

// `options`: CpuOptions or CudaOptions.
template <class Options>
attention::Limits limits_of(const Options& options) {
  attention::Limits limits;
  limits.max_batch = options.max_batch;
  limits.max_tokens = options.max_tokens;
  limits.max_kvlen = options.max_kvlen;
  limits.max_pages = (options.max_kvlen + options.page_size - 1) / options.page_size;
  return limits;
}

// `group`: whose pages its tables name.
inline attention::Step step_of(const Batch& batch, size_t group) {
  attention::Step step;
  step.batch = batch.size();
  step.seqstarts = batch.seqstarts.data();
  step.kvstarts = batch.kvstarts.data();
  step.start_pos = batch.start_pos.data();
  step.cachestarts = group == 0 ? batch.cachestarts.data() : batch.more_cachestarts[group - 1].data();
  step.max_pages = batch.max_pages;
  step.decoding_batches = batch.decoding_batches;
  step.max_seqlen = batch.max_seqlen;
  step.max_kvlen = batch.max_kvlen;
  return step;
}

}  // namespace kvasir::model
