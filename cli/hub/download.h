// One file brought here whole: resumed where an earlier try ended, checked against its checksum, and given
// its name only then.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

#include "cli/hub/http_client.h"

namespace kvasir::hub {

struct RemoteFile {
  std::string name;  // its path in the repository
  int64_t size = 0;
  std::string checksum;  // "sha256:..." of the content, or "git:..." of the content as git names it
};

using Progress = std::function<void(const RemoteFile& file, int64_t done)>;

struct DownloadOptions {
  int tries = 6;                               // in a row that bring nothing
  std::chrono::milliseconds retry_wait{1000};  // doubled after each
};

Status download(const HttpClient& client, const Url& url, const RemoteFile& file, const std::filesystem::path& to,
                const DownloadOptions& options, const Progress& progress);

}  // namespace kvasir::hub
