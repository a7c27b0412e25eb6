// truncate_prompt_tokens: a prompt keeps its last tokens.
#pragma once

#include "server/services.h"

namespace kvasir::server::rpc {

inline Status keep_last(Services& services, const Caller& caller, size_t most, GenerateInput& in) {
  KVASIR_ASSIGN(auto ids, services.tokenize(caller, in.model, in.prompt));
  const size_t from = ids.size() > most ? ids.size() - most : 0;
  in.prompt = TokensInput(ids.begin() + ptrdiff_t(from), ids.end());
  return {};
}

}  // namespace kvasir::server::rpc
