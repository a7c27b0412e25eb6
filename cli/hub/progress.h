// How far a download is: a line that moves on a terminal, a line of the log each tenth elsewhere.
#pragma once

#include <chrono>
#include <vector>

#include "cli/hub/download.h"

namespace kvasir::hub {

class ProgressLine {
 public:
  explicit ProgressLine(const std::vector<RemoteFile>& files);
  void at(const RemoteFile& file, int64_t done);
  void finish();

 private:
  using Clock = std::chrono::steady_clock;
  bool terminal_;
  int64_t total_ = 0, before_ = 0, in_file_ = 0, resumed_ = -1;
  int tenths_ = 0;
  std::string name_;
  Clock::time_point began_ = Clock::now(), shown_{};
};

}  // namespace kvasir::hub
