// SGLang's /generate, read field by field into what every protocol becomes.
#pragma once

#include <string_view>
#include <vector>

#include "server/generate.h"
#include "server/http/sglang_reply.h"

namespace kvasir::server::http {

struct SglangCall {
  std::vector<GenerateInput> inputs;  // one a prompt
  SglangShape shape;
};

Result<SglangCall> parse_sglang(std::string_view body, const ServerOptions& limits);

}  // namespace kvasir::server::http
