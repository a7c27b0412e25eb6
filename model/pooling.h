// What becomes of a prompt's last hidden states where not an answer is wanted but the prompt as a whole: an embedding.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "model/batch.h"

namespace kvasir::model {

// Whose hidden state: the last token's, the mean of all, the first token's.
enum class Pooling : uint8_t { last, mean, cls };
const char* pooling_name(Pooling pooling);

// How a model's embeddings are made, by its own files or by an operator.
struct PoolingRule {
  Pooling pooling = Pooling::last;
  bool normalize = true;  // to length 1
  std::string refusal;    // why its files' way is not served; empty: it is
};

// sentence-transformers' modules.json; `read` gives the config.json of a module's folder.
Result<PoolingRule> pooling_from_modules(std::string_view modules, const std::string& name,
                                         const std::function<Result<std::string>(const std::string& folder)>& read);
// <arch>.pooling_type of a GGUF file.
PoolingRule pooling_from_gguf(int32_t type, PoolingRule usual);
// An operator's --pooling (auto, last, mean, cls) and --embed-normalize (auto, yes, no) over it.
Status choose_pooling(const std::string& pooling, const std::string& normalize, PoolingRule& rule);

// Rows [first, first + count) of all the pools' rows, one after another in `hidden`, each times `scale` to its pool's
// sum. In order of position, so that chunks give the same bits as the whole.
void add_pooled(std::span<const Batch::Pool> pools, int64_t first, int64_t count, const float* hidden, int64_t cols,
                float scale);

// From sums over `rows` to what a client gets: the mean, the first `dimensions` of it (0: all), to length 1. False:
// they are no numbers.
bool finish_embedding(std::vector<float>& sum, int64_t rows, int64_t dimensions, bool normalize);

}  // namespace kvasir::model
