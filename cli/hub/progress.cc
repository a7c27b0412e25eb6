#include "cli/hub/progress.h"

#include <unistd.h>

#include <cstdio>

#include "core/log.h"

namespace kvasir::hub {

ProgressLine::ProgressLine(const std::vector<RemoteFile>& files) : terminal_(isatty(STDERR_FILENO) == 1) {
  for (const RemoteFile& f : files) total_ += f.size;
}

void ProgressLine::at(const RemoteFile& file, int64_t done) {
  if (name_ != file.name) before_ += in_file_, name_ = file.name, resumed_ = resumed_ < 0 ? done : resumed_;
  in_file_ = done;
  int64_t all = before_ + done;
  auto now = Clock::now();
  double seconds = std::chrono::duration<double>(now - began_).count();
  double rate = seconds > 0 ? double(all - resumed_) / seconds / 1e6 : 0;
  if (terminal_ && (now - shown_ > std::chrono::milliseconds(100) || all == total_)) {
    shown_ = now;
    std::fprintf(stderr, "\r\033[K%s  %.1f of %.1f MB, %.1f MB/s", name_.c_str(), double(all) / 1e6,
                 double(total_) / 1e6, rate);
  }
  int tenths = total_ > 0 ? int(10 * double(all) / double(total_)) : 10;
  if (!terminal_ && tenths > tenths_) {
    tenths_ = tenths;
    log_info("downloading", {{"file", name_}, {"percent", 10 * tenths}, {"mb_per_second", rate}});
  }
}

void ProgressLine::finish() {
  if (terminal_) std::fputc('\n', stderr);
}

}  // namespace kvasir::hub
