// How a connection to a server is made private: whom to trust, and who we say we are.
#pragma once

#include <string>

#include "core/status.h"

namespace kvasir::client {

struct TlsFiles {
  bool on = false;        // encrypt, trusting the system's authorities unless `ca` names others
  std::string ca;         // PEM file of authorities; naming one turns TLS on
  std::string cert, key;  // PEM files that say who we are, for a server that wants to know
  bool wanted() const { return on || !ca.empty() || !cert.empty() || !key.empty(); }
};

struct TlsPems {  // the contents of these files
  std::string ca, cert, key;
};
Result<TlsPems> read_tls(const TlsFiles& files);

}  // namespace kvasir::client
