// Where a recording of the scheduler goes: a thread of its own writes it, so that a slow disk never holds up a
// step. What it cannot keep up with is not kept: the recording then ends, and says so in its last line.
#pragma once

#include <condition_variable>
#include <cstdio>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "core/status.h"

namespace kvasir::engine {

class RecordingFile {
 public:
  static constexpr size_t kMostQueuedBytes = 64 << 20;

  static Result<std::unique_ptr<RecordingFile>> open(const std::string& path, size_t most_queued = kMostQueuedBytes);
  ~RecordingFile();  // writes what is queued
  RecordingFile(const RecordingFile&) = delete;

  void write(std::string lines);  // whole lines; never blocks on the disk

 private:
  RecordingFile(FILE* file, std::string path, size_t most_queued);
  void run();

  FILE* const file_;
  const std::string path_;
  const size_t most_queued_;
  std::mutex mutex_;
  std::condition_variable more_;
  std::deque<std::string> queue_;
  size_t queued_bytes_ = 0;
  bool stop_ = false, lost_ = false;
  std::thread thread_;
};

}  // namespace kvasir::engine
