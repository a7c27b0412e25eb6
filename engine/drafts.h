// Drafts of a sequence's next tokens, whoever makes them: which of them pay, and how many were right.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "engine/prompt_lookup.h"

namespace kvasir::engine {

enum class DraftSource : uint8_t {
  lookup,      // what the prompt or the answer said before
  prediction,  // of the answer, by the client
  grammar,     // what must come next
  model,       // the draft model
};
inline constexpr size_t kDraftSources = 4;
inline constexpr std::array<const char*, kDraftSources> kDraftSourceNames = {"lookup", "prediction", "grammar",
                                                                             "model"};

// Tokens of drafts that were verified, and those that were right.
struct DraftCount {
  int64_t drafted = 0, accepted = 0;
};
using DraftCounts = std::array<DraftCount, kDraftSources>;  // by source

// What one choice knows of its drafts. The step thread's.
struct ChoiceDrafts {
  std::unique_ptr<PromptLookup> lookup;
  DraftSource source = DraftSource::lookup;  // of the last one
  double forced_right = 0.9;                 // share of a grammar's tokens that were right, a moving average
  double asking_us = 0;                      // a grammar for what must come next: what that takes, likewise
  double model_right = -1;                   // share of the draft model's that were right; below 0: it drafted none yet

  // A token of the last draft, where all before it were right.
  void verified(bool right) {
    if (source == DraftSource::grammar) forced_right += 0.125 * (double(right) - forced_right);
    if (source == DraftSource::model) model_right += 0.125 * (double(right) - model_right);
  }
};

}  // namespace kvasir::engine
