// Flags and configuration keys of ppl.llm.serving, so that what starts its server starts this one.
#pragma once

#include "core/config.h"

namespace kvasir::cli {

void define_ppl_names(Options& options);

}  // namespace kvasir::cli
