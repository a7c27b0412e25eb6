// Heads that draft for a model out of its own hidden states: EAGLE-3's folders, and the layer of multi-token prediction
// that some checkpoints carry. Both are one decoder layer over a token and what the model made of the token before it;
// from there on they go on with what they made themselves.
//
//   EAGLE-3: row i reads the embedding of token i + 1 and, of row i of the model, the streams that enter three layers,
//            which fc makes one of; it draws token i + 2, of a vocabulary of its own (d2t).
//   MTP:     the same token and the model's last state, behind its norm; eh_proj makes one of both.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/status.h"
#include "model/config.h"
#include "model/formats/weights.h"
#include "model/runner.h"

namespace kvasir::model {

struct HeadConfig {
  ModelConfig decoder;        // of its one layer; `vocab` are the tokens that it may draw
  int32_t known_tokens = 0;   // that it may read: the model's
  int32_t given = 0;          // columns of a row of the model
  std::vector<int32_t> kept;  // Network::keep() of the model, which gives them
  bool eagle = false;         // else MTP
  bool norm_before_residual = false;
  std::vector<int32_t> token_of;  // of the model, for each that it may draw; empty: the same

  void describe(int64_t places, ModelInfo* info) const;  // what it is beside its decoder
};
// What was drawn, as the model names it.
void name_tokens(const std::vector<int32_t>& token_of, std::vector<Sampled>& drawn);

struct HeadFiles {
  HeadConfig config;
  std::unique_ptr<Weights> weights;
};

// Whether a folder is an EAGLE-3 head, by its config.json.
bool is_eagle3(const std::string& folder);
// Refused where it is not made for this model.
Result<HeadFiles> open_eagle3(const std::string& folder, const ModelConfig& model);
// Of the model's own files; no weights: they have none.
Result<HeadFiles> open_next_layer(const std::string& path, const ModelConfig& model);
// That folder's, or where none is named the other. Refused where the model is split.
Result<HeadFiles> open_head(const std::string& folder, const std::string& path, const ModelConfig& model,
                            int32_t ranks);

}  // namespace kvasir::model
