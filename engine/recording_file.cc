#include "engine/recording_file.h"

#include <cerrno>
#include <cstring>

#include "core/cat.h"
#include "core/log.h"

namespace kvasir::engine {

Result<std::unique_ptr<RecordingFile>> RecordingFile::open(const std::string& path, size_t most_queued) {
  FILE* file = std::fopen(path.c_str(), "w");
  if (file == nullptr)
    return failed_precondition(cat("the recording ", path, " cannot be written: ", std::strerror(errno)))
        .with_field("record");
  return std::unique_ptr<RecordingFile>(new RecordingFile(file, path, most_queued));
}

RecordingFile::RecordingFile(FILE* file, std::string path, size_t most_queued)
    : file_(file), path_(std::move(path)), most_queued_(most_queued), thread_([this] { run(); }) {}

RecordingFile::~RecordingFile() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    more_.notify_one();
  }
  thread_.join();
  if (std::fclose(file_) != 0) log_warn("the recording is incomplete", {{"file", path_}});
}

void RecordingFile::write(std::string lines) {
  std::lock_guard lock(mutex_);
  if (lost_) return;
  if (queued_bytes_ + lines.size() > most_queued_) {
    lost_ = true;
    lines = "{\"call\":\"lost\"}\n";
    log_warn("the disk does not keep up: the recording ends here", {{"file", path_}});
  }
  queued_bytes_ += lines.size();
  queue_.push_back(std::move(lines));
  more_.notify_one();
}

void RecordingFile::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    more_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    std::string lines = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    const bool written = std::fwrite(lines.data(), 1, lines.size(), file_) == lines.size() && std::fflush(file_) == 0;
    const int why = errno;
    lock.lock();
    queued_bytes_ -= lines.size();
    if (written || lost_) continue;
    lost_ = true;
    queue_.clear();
    queued_bytes_ = 0;
    log_warn("the recording ends: it cannot be written", {{"file", path_}, {"why", std::string(std::strerror(why))}});
  }
}

}  // namespace kvasir::engine
