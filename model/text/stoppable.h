// A compiler of grammars that ends early when nobody waits any longer.
#pragma once

#include <functional>

#include "model/text/text.h"

namespace kvasir::text {

class StoppableCompiler : public GrammarCompiler {
 public:
  using Stopped = std::function<bool()>;  // whether it is wanted no longer; called every millisecond or so
  // `cancelled` when it was stopped: that is not remembered of the grammar, as other refusals are.
  virtual Result<std::unique_ptr<Matcher>> compile_unless(const Stopped& stopped, const GrammarSpec& spec) = 0;
  Result<std::unique_ptr<Matcher>> compile(const GrammarSpec& spec) final { return compile_unless(nullptr, spec); }
};

}  // namespace kvasir::text
