#include "server/http/tls.h"

#include <openssl/ssl.h>
#include <sys/stat.h>

#include <boost/asio/ssl/context.hpp>

#include "core/cat.h"
#include "core/log.h"

namespace kvasir::server::http {

namespace ssl = boost::asio::ssl;

Result<std::unique_ptr<TlsFiles>> TlsFiles::open(std::string cert, std::string key, std::string client_ca) {
  std::unique_ptr<TlsFiles> files(new TlsFiles(std::move(cert), std::move(key), std::move(client_ca)));
  KVASIR_ASSIGN(files->context_, files->load());
  files->version_ = files->version();
  return files;
}

Result<TlsFiles::Context> TlsFiles::load() const {
  auto context = std::make_shared<ssl::context>(ssl::context::tls_server);
  boost::system::error_code error;
  auto failed = [&](const char* option, const std::string& path) {
    return invalid_argument(cat(option, " '", path, "' cannot be used: ", error.message()));
  };
  SSL_CTX_set_min_proto_version(context->native_handle(), TLS1_2_VERSION);
  context->use_certificate_chain_file(cert_, error);
  if (error) return failed("tls_cert", cert_);
  context->use_private_key_file(key_, ssl::context::pem, error);
  if (error) return failed("tls_key", key_);
  if (!client_ca_.empty()) {
    context->load_verify_file(client_ca_, error);
    if (error) return failed("tls_client_ca", client_ca_);
    context->set_verify_mode(ssl::verify_peer | ssl::verify_fail_if_no_peer_cert);
  }
  return context;
}

std::string TlsFiles::version() const {
  std::string out;
  for (const std::string* path : {&cert_, &key_, &client_ca_}) {
    struct stat s {};
    if (::stat(path->c_str(), &s) == 0)
      out += cat(s.st_ino, '/', s.st_mtim.tv_sec, '.', s.st_mtim.tv_nsec, '/', s.st_size, ' ');
  }
  return out;
}

TlsFiles::Context TlsFiles::current() {
  std::lock_guard lock(mutex_);
  Time now = SystemClock().now();
  if (now - looked_ < std::chrono::seconds(1)) return context_;
  looked_ = now;
  std::string version = this->version();
  if (version == version_) return context_;
  auto loaded = load();
  if (loaded.ok()) {
    context_ = *loaded;
    version_ = version;
    log_info("the TLS files were read again");
  } else {
    log_warn(cat("the TLS files changed and cannot be used; the old ones stay in force: ", loaded.status().message()));
  }
  return context_;
}

}  // namespace kvasir::server::http
