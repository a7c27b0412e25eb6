// The networks of heads that draft (model/head.h): a decoder of one layer behind an entrance of its own.
#pragma once

#include <memory>

#include "model/arch/decoder.h"
#include "model/head.h"

namespace kvasir::model {

// `embedding` and `head` are the model's, for what the head's files do not have; ids -1 where the model has none.
Result<std::unique_ptr<Network>> load_head_network(const HeadConfig& config, Weights& weights, Ops& ops,
                                                   Matrix embedding, Matrix head);

}  // namespace kvasir::model
