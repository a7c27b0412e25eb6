// The certificate, key and client authority that both ports use: one set at a time, judged together before anybody
// is served with it, and read again when the files change, so that a renewed certificate needs no restart.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "core/clock.h"
#include "core/status.h"

namespace boost::asio::ssl {
class context;
}

namespace kvasir::server {

struct TlsPair {
  std::string cert, key, client_ca;                    // PEM; an empty client_ca asks clients for no certificate
  std::shared_ptr<boost::asio::ssl::context> context;  // the settings made of them
};

class TlsSource {
 public:
  // A client_ca makes it mutual: a client without a certificate from it is refused.
  static Result<std::unique_ptr<TlsSource>> open(std::string cert, std::string key, std::string client_ca);

  // The set of the moment. Files that do not belong together, or that somebody is still writing, leave the old set in
  // force. Thread-safe.
  std::shared_ptr<const TlsPair> current();

 private:
  TlsSource(std::string cert, std::string key, std::string client_ca)
      : cert_(std::move(cert)), key_(std::move(key)), client_ca_(std::move(client_ca)) {}
  struct Version {
    std::string name;      // changes when a file does
    bool settled = false;  // no file changed within the last second
  };
  Version version() const;
  Result<std::shared_ptr<const TlsPair>> load() const;

  const std::string cert_, key_, client_ca_;
  std::mutex mutex_;
  std::shared_ptr<const TlsPair> pair_;
  std::string version_;  // of what was looked at last, whether it was taken or not
  Time looked_{};
};

}  // namespace kvasir::server
