// TLS settings from files, read again when a file changes, so that a renewed certificate needs no restart.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "core/clock.h"
#include "core/status.h"

namespace boost::asio::ssl {
class context;
}

namespace kvasir::server::http {

class TlsFiles {
 public:
  using Context = std::shared_ptr<boost::asio::ssl::context>;
  // A client_ca makes it mutual: a client without a certificate from it is refused.
  static Result<std::unique_ptr<TlsFiles>> open(std::string cert, std::string key, std::string client_ca);

  // The settings of the moment. New files that cannot be read leave the old settings in force.
  Context current();

 private:
  TlsFiles(std::string cert, std::string key, std::string client_ca)
      : cert_(std::move(cert)), key_(std::move(key)), client_ca_(std::move(client_ca)) {}
  Result<Context> load() const;
  std::string version() const;  // changes when a file does

  std::string cert_, key_, client_ca_;
  std::mutex mutex_;
  Context context_;
  std::string version_;
  Time looked_{};
};

}  // namespace kvasir::server::http
