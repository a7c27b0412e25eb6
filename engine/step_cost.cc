#include "engine/step_cost.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iterator>

#include "core/cat.h"
#include "scheduler/options_json.h"

namespace kvasir::engine {

Status read_cost_model(const std::string& file, scheduler::StepCost* cost) {
  std::ifstream in(file, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(in), {}};
  if (!in && text.empty()) return not_found(cat("the cost model ", file, " cannot be read")).with_field("cost_model");
  scheduler::Settings options;
  KVASIR_TRY(scheduler::apply_json(text, &options, file));
  *cost = options.cost;
  return {};
}

Result<double> time_page_moves(model::Runner& runner, int64_t pages, int64_t host_pages) {
  const auto n = static_cast<int32_t>(std::min<int64_t>({16, pages, host_pages}));
  double best = 0;
  for (int round = 0; round < 3; ++round) {  // the first one touches the memory
    model::Batch batch;
    batch.seqstarts = batch.kvstarts = {0};
    for (bool to_host : {true, false})
      for (int32_t p = 0; p < n; ++p) batch.moves.push_back({p, p, to_host});
    const auto began = std::chrono::steady_clock::now();
    KVASIR_TRY(runner.launch(batch, {}));
    KVASIR_TRY(runner.wait().status());
    const double us = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - began).count();
    best = round == 0 ? us : std::min(best, us);
  }
  return best / (2.0 * n);
}

}  // namespace kvasir::engine
