#include "server/descriptors.h"

#include <dirent.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdint>

#include "core/cat.h"
#include "core/log.h"

namespace kvasir::server {
namespace {

constexpr int64_t kSpare = 32;    // of each port: connections over the limit that are heard for a moment (health)
constexpr int64_t kOthers = 128;  // model, log, keys, certificates, collector, threads' own
constexpr int64_t kFewest = 8;    // connections a port is of any use with

int64_t open_now() {
  int64_t n = 0;
  if (DIR* folder = ::opendir("/proc/self/fd")) {
    while (::readdir(folder)) ++n;
    ::closedir(folder);
  }
  return n;
}

}  // namespace

Result<int> fit_connections(int wanted, int ports) {
  rlimit limit{};
  if (ports <= 0 || ::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return wanted;
  const int64_t others = open_now() + kOthers;
  const int64_t needed = others + ports * (wanted + kSpare), before = int64_t(limit.rlim_cur);
  if (before < needed) {
    limit.rlim_cur = limit.rlim_max == RLIM_INFINITY ? rlim_t(needed) : std::min(limit.rlim_max, rlim_t(needed));
    if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) limit.rlim_cur = rlim_t(before);
  }
  const int64_t now = int64_t(limit.rlim_cur);
  const int64_t room = (now - others) / ports - kSpare;
  if (now != before)
    log_info("the limit on open files was raised for the connections", {{"from", before}, {"to", now}});
  if (room >= wanted) return wanted;
  if (room < kFewest)
    return failed_precondition(cat("the limit on open files is ", now, ", of which ", others, " are for other things; ",
                                   ports, " ports need at least ", others + ports * (kFewest + kSpare),
                                   ": raise it (ulimit -n, LimitNOFILE=)"));
  log_warn("the limit on open files has room for fewer connections than max_connections; raise it (ulimit -n)",
           {{"limit", now}, {"max_connections", wanted}, {"connections_of_each_port", room}});
  return int(room);
}

}  // namespace kvasir::server
