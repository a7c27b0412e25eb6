#include "server/tls.h"

#include <fcntl.h>
#include <openssl/ssl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <boost/asio/buffer.hpp>
#include <boost/asio/ssl/context.hpp>
#include <cerrno>
#include <cstring>

#include "core/cat.h"
#include "core/log.h"

namespace kvasir::server {
namespace {

namespace ssl = boost::asio::ssl;

constexpr size_t kMostBytes = 4 << 20;  // a large bundle of authorities has a quarter of it
// Of TLS 1.2: forward secrecy and authenticated encryption, as gRPC's port has it. TLS 1.3 knows nothing else.
constexpr const char* kCiphers = "ECDHE+AESGCM:ECDHE+CHACHA20";

Result<std::string> read_file(const char* option, const std::string& path) {
  auto failed = [&](std::string_view why) {
    return failed_precondition(cat(option, ' ', path, " cannot be read: ", why));
  };
  int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe nobody writes to is not waited for
  if (fd < 0) return failed(std::strerror(errno));
  struct stat info {};
  std::string text;
  bool regular = ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && size_t(info.st_size) <= kMostBytes;
  if (regular) {
    text.resize(size_t(info.st_size));
    regular = ::read(fd, text.data(), text.size()) == ssize_t(text.size());
  }
  ::close(fd);
  if (!regular) return failed(cat("it is no file of at most ", kMostBytes, " bytes"));
  return text;
}

}  // namespace

Result<std::unique_ptr<TlsSource>> TlsSource::open(std::string cert, std::string key, std::string client_ca) {
  std::unique_ptr<TlsSource> files(new TlsSource(std::move(cert), std::move(key), std::move(client_ca)));
  files->version_ = files->version().name;
  KVASIR_ASSIGN(files->pair_, files->load());
  return files;
}

Result<std::shared_ptr<const TlsPair>> TlsSource::load() const {
  auto pair = std::make_shared<TlsPair>();
  KVASIR_ASSIGN(pair->cert, read_file("tls_cert", cert_));
  KVASIR_ASSIGN(pair->key, read_file("tls_key", key_));
  if (!client_ca_.empty()) {
    KVASIR_ASSIGN(pair->client_ca, read_file("tls_client_ca", client_ca_));
  }
  pair->context = std::make_shared<ssl::context>(ssl::context::tls_server);
  ssl::context& context = *pair->context;
  SSL_CTX* native = context.native_handle();
  boost::system::error_code error;
  SSL_CTX_set_min_proto_version(native, TLS1_2_VERSION);
  SSL_CTX_set_cipher_list(native, kCiphers);
  context.use_certificate_chain(boost::asio::buffer(pair->cert), error);
  if (error)
    return failed_precondition(cat("tls_cert ", cert_, " is no readable PEM certificate chain: ", error.message()));
  context.use_private_key(boost::asio::buffer(pair->key), ssl::context::pem, error);
  if (error || SSL_CTX_check_private_key(native) != 1)
    return failed_precondition(cat("tls_key ", key_, " is no readable PEM key of the certificate ", cert_));
  if (!client_ca_.empty()) {
    context.add_certificate_authority(boost::asio::buffer(pair->client_ca), error);
    if (error || pair->client_ca.find("-----BEGIN ") == std::string::npos)
      return failed_precondition(cat("tls_client_ca ", client_ca_, " is no readable PEM certificate"));
    context.set_verify_mode(ssl::verify_peer | ssl::verify_fail_if_no_peer_cert);
  }
  return std::shared_ptr<const TlsPair>(std::move(pair));
}

TlsSource::Version TlsSource::version() const {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  auto nanoseconds = [](const timespec& t) { return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec; };
  Version out{"", true};
  for (const std::string* path : {&cert_, &key_, &client_ca_}) {
    struct stat s {};
    if (path->empty() || ::stat(path->c_str(), &s) != 0) continue;
    out.name += cat(s.st_ino, '/', nanoseconds(s.st_mtim), '/', nanoseconds(s.st_ctim), '/', s.st_size, ' ');
    const int64_t age = nanoseconds(now) - nanoseconds(s.st_ctim);
    if (age >= 0 && age < 1'000'000'000) out.settled = false;  // the other half may be on its way
  }
  return out;
}

std::shared_ptr<const TlsPair> TlsSource::current() {
  std::lock_guard lock(mutex_);
  const Time now = SystemClock().now();
  if (now - looked_ < std::chrono::milliseconds(500)) return pair_;
  looked_ = now;
  const Version found = version();
  if (found.name == version_ || !found.settled) return pair_;
  auto loaded = load();
  if (version().name != found.name) return pair_;  // they changed while they were read
  version_ = found.name;
  if (loaded.ok()) {
    pair_ = *std::move(loaded);
    log_info("the TLS files were read again");
  } else {
    log_warn(cat("the TLS files changed and cannot be used; the old ones stay in force: ", loaded.status().message()));
  }
  return pair_;
}

}  // namespace kvasir::server
