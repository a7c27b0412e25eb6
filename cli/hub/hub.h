// hf:ORG/REPO[:FILE], as an operator names it, to a file or folder of this machine. What is here already
// is used without asking anybody; the rest comes from $HF_ENDPOINT. No request can name a model.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "cli/hub/download.h"
#include "core/config.h"
#include "core/status.h"

namespace kvasir::hub {

struct HubOptions {
  std::string endpoint;  // empty: $HF_ENDPOINT, or https://huggingface.co
  std::string token;     // empty: $HF_TOKEN
  std::string folder;    // empty: kvasir/models in the user's cache
  ByteSize limit{int64_t(100) << 30};
  bool offline = false;  // or $HF_HUB_OFFLINE
  std::chrono::milliseconds patience{30000};
  DownloadOptions download;

  void define(Options& options);
};

struct HubName {
  std::string repo;  // "ORG/REPO"
  std::string file;  // empty: the repository's only model
};
Result<HubName> parse_hub_name(std::string_view name);

// What of a repository's files makes the model that was named.
Result<std::vector<RemoteFile>> choose_files(const HubName& name, const std::vector<RemoteFile>& all);

// `model` itself unless it begins with hf:.
Result<std::string> local_model(const std::string& model, const HubOptions& options);

}  // namespace kvasir::hub
