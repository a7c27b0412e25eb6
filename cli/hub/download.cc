#include "cli/hub/download.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "core/cat.h"

namespace kvasir::hub {
namespace {

namespace fs = std::filesystem;

// The checksum of a file that grows: of what it holds already, then of each piece.
class Checksum {
 public:
  explicit Checksum(const RemoteFile& file) : context_(EVP_MD_CTX_new()) {
    git_ = file.checksum.starts_with("git:");
    size_ = file.size;
    restart();
  }
  void restart() {
    EVP_DigestInit_ex(context_.get(), git_ ? EVP_sha1() : EVP_sha256(), nullptr);
    if (git_) {
      std::string head = cat("blob ", size_);
      EVP_DigestUpdate(context_.get(), head.c_str(), head.size() + 1);
    }
  }
  void add(const char* data, size_t size) { EVP_DigestUpdate(context_.get(), data, size); }
  std::string text() {
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned size = 0;
    EVP_DigestFinal_ex(context_.get(), digest, &size);
    constexpr char kHex[] = "0123456789abcdef";
    std::string out = git_ ? "git:" : "sha256:";
    for (unsigned i = 0; i < size; ++i) out += {kHex[digest[i] >> 4], kHex[digest[i] & 15]};
    return out;
  }

 private:
  struct Free {
    void operator()(EVP_MD_CTX* c) const { EVP_MD_CTX_free(c); }
  };
  std::unique_ptr<EVP_MD_CTX, Free> context_;
  bool git_ = false;
  int64_t size_ = 0;
};

// The part that is here, open at its end.
class Part {
 public:
  Part(fs::path path, const RemoteFile& file) : path_(std::move(path)), file_(file), sum_(file) {}
  ~Part() {
    if (fd_ >= 0) ::close(fd_);
  }
  Status open() {
    fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd_ < 0) return failed("open");
    std::vector<char> buffer(size_t(1) << 20);
    for (ssize_t n; (n = ::read(fd_, buffer.data(), buffer.size())) != 0;) {
      if (n < 0) return failed("read");
      sum_.add(buffer.data(), size_t(n));
      size_ += n;
    }
    return size_ > file_.size ? restart() : Status();
  }
  Status restart() {
    if (::ftruncate(fd_, 0) != 0 || ::lseek(fd_, 0, SEEK_SET) != 0) return failed("empty");
    size_ = 0;
    sum_.restart();
    return {};
  }
  Status append(std::string_view bytes) {
    if (int64_t(bytes.size()) > file_.size - size_)
      return {Code::data_loss, cat(file_.name, " is longer than the ", file_.size, " bytes it was said to have")};
    while (!bytes.empty()) {
      ssize_t n = ::write(fd_, bytes.data(), bytes.size());
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return failed("write");
      sum_.add(bytes.data(), size_t(n));
      size_ += n;
      bytes.remove_prefix(size_t(n));
    }
    return {};
  }
  // The file is whole: gives it its name, or throws it away when it is not what it should be.
  Status finish(const fs::path& to) {
    if (std::string sum = sum_.text(); sum != file_.checksum) {
      ::unlink(path_.c_str());
      return {Code::data_loss,
              cat(file_.name, " came with checksum ", sum, " and not ", file_.checksum, "; what came is thrown away")};
    }
    if (::fsync(fd_) != 0) return failed("write");
    std::error_code error;
    fs::rename(path_, to, error);
    return error ? failed_precondition(cat("cannot name ", to.string(), ": ", error.message())) : Status();
  }
  int64_t size() const { return size_; }

 private:
  Status failed(const char* what) const {
    return failed_precondition(cat("cannot ", what, ' ', path_.string(), ": ", std::strerror(errno)));
  }
  fs::path path_;
  const RemoteFile& file_;
  Checksum sum_;
  int fd_ = -1;
  int64_t size_ = 0;
};

// "bytes 100-199/200" answers a request for byte 100 and on of a file of 200.
bool range_fits(std::string_view text, int64_t begin, int64_t size) {
  return text == cat("bytes ", begin, '-', size - 1, '/', size);
}

bool worth_a_retry(const Status& s) { return s.code() == Code::unavailable || s.code() == Code::deadline_exceeded; }

Status bring_rest(const HttpClient& client, const Url& url, const RemoteFile& file, Part& part,
                  const Progress& progress) {
  auto head = [&](const HttpHead& h) -> Status {
    if (h.status == 206) {
      if (range_fits(h.content_range, part.size(), file.size)) return {};
      return {Code::data_loss, cat(file.name, ": the rest was asked for from byte ", part.size(), " of ", file.size,
                                   " and '", h.content_range, "' came")};
    }
    if (h.status != 200) return refusal(h.status, file.name);
    if (h.length >= 0 && h.length != file.size)
      return {Code::data_loss, cat(file.name, " is ", h.length, " bytes long there, not the ", file.size, " listed")};
    return part.size() > 0 ? part.restart() : Status();  // it begins anew
  };
  return client.get(url, part.size(), head, [&](std::string_view bytes) -> Status {
    KVASIR_TRY(part.append(bytes));
    progress(file, part.size());
    return {};
  });
}

}  // namespace

Status download(const HttpClient& client, const Url& url, const RemoteFile& file, const fs::path& to,
                const DownloadOptions& options, const Progress& progress) {
  std::error_code error;
  fs::create_directories(to.parent_path(), error);
  // Named by its content: what another version of the file left behind is never continued.
  std::string sum = file.checksum.substr(file.checksum.find(':') + 1, 16);
  Part part(fs::path(to).concat(cat('.', sum, ".part")), file);
  KVASIR_TRY(part.open());
  progress(file, part.size());
  auto wait = options.retry_wait;
  for (int fruitless = 0; part.size() < file.size;) {
    int64_t before = part.size();
    Status status = bring_rest(client, url, file, part, progress);
    if (status.ok() && part.size() < file.size)
      status = unavailable(cat(file.name, " ended after ", part.size(), " of ", file.size, " bytes"));
    if (status.ok()) break;
    if (part.size() > before) {
      fruitless = 0, wait = options.retry_wait;
    } else if (++fruitless >= options.tries) {
      return status;
    }
    if (!worth_a_retry(status)) return status;
    std::this_thread::sleep_for(wait);
    wait *= 2;
  }
  return part.finish(to);
}

}  // namespace kvasir::hub
