#include "client/target.h"

#include "client/grpc_target.h"
#include "client/openai_target.h"

namespace kvasir::client {

Result<std::unique_ptr<Target>> make_target(const TargetOptions& options) {
  if (options.protocol == "kvasir") return make_kvasir_target(options);
  if (options.protocol == "ppl") return make_ppl_target(options);
  if (options.protocol == "vllm") return make_vllm_target(options);
  if (options.protocol == "openai") return make_openai_target(options, false);
  if (options.protocol == "openai-chat") return make_openai_target(options, true);
  return invalid_argument("protocol is " + options.protocol + "; it must be kvasir, ppl, vllm, openai or openai-chat");
}

}  // namespace kvasir::client
