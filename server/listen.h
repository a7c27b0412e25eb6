// Where a port listens: the same addresses for gRPC and for HTTP.
#pragma once

#include <string>
#include <vector>

#include "core/status.h"

namespace kvasir::server {

struct Listening {
  std::vector<int> sockets;  // one an address; the caller's to close
  int port = -1;
};

// "127.0.0.1,::1" is two; "" is one, which is every interface. Blanks around them do not count.
std::vector<std::string> addresses(const std::string& hosts);

// Every address of `host`, which may be several with commas between them ("" is every interface; brackets around an
// IPv6 address are fine), all on one port, 0 for a free one. `flag` is what sets the port, for the message.
Result<Listening> listen_on(const std::string& host, int port, const char* flag);

}  // namespace kvasir::server
