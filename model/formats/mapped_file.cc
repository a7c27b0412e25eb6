#include "model/formats/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/cat.h"

namespace kvasir::model {
namespace {
constexpr uintptr_t kPage = 4096;

Status open_error(const std::string& path, const char* what) {
  std::string message = cat("cannot ", what, " ", path, ": ", std::strerror(errno));
  return errno == ENOENT ? not_found(std::move(message)) : invalid_argument(std::move(message));
}
}  // namespace

Result<std::shared_ptr<MappedFile>> MappedFile::open(const std::string& path) {
  // A pipe without a writer, or a device, would keep open() waiting for ever.
  int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) return open_error(path, "open");
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd);
    return invalid_argument(cat(path, " is not a regular file"));
  }
  if (info.st_size == 0) {
    ::close(fd);
    return invalid_argument(cat(path, " is empty"));
  }
  void* data = ::mmap(nullptr, size_t(info.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
  ::close(fd);
  if (data == MAP_FAILED) return open_error(path, "map");
  ::madvise(data, size_t(info.st_size), MADV_SEQUENTIAL);
  return std::shared_ptr<MappedFile>(new MappedFile(path, static_cast<const uint8_t*>(data), size_t(info.st_size)));
}

MappedFile::~MappedFile() { ::munmap(const_cast<uint8_t*>(data_), size_); }

void MappedFile::release(const uint8_t* begin, size_t size) const {
  uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + kPage - 1) & ~(kPage - 1);
  uintptr_t last = (reinterpret_cast<uintptr_t>(begin) + size) & ~(kPage - 1);
  if (last > first) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

}  // namespace kvasir::model
