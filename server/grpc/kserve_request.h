// A ModelInferRequest as ours: text_input, and sampling from parameters or Triton's sampling_parameters.
#pragma once

#include "core/status.h"
#include "kserve.pb.h"
#include "server/generate.h"

namespace kvasir::server::rpc {

struct InferInput {
  GenerateInput generate;
  bool stream = false;     // ModelStreamInfer: an answer a piece, not one for all
  bool echo = false;       // text_output begins with text_input
  bool embedding = false;  // the output `embedding` is asked for, in place of text_output
  bool raw = false;        // the tensors came as raw bytes, and go back so
  std::string text_input;
};
Result<InferInput> read_infer_request(const inference::ModelInferRequest& from, const ServerOptions& limits);

// The embedding tensor.
void write_embedding(const std::vector<float>& values, bool raw, inference::ModelInferResponse& to);
// The text_output tensor.
void write_text_output(const std::string& text, bool raw, inference::ModelInferResponse& to);

}  // namespace kvasir::server::rpc
