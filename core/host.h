// What this process may use of the machine: the smallest of the hardware, the affinity mask and every
// control group above it (version 1 and 2).
#pragma once

#include <cstdint>
#include <string>

namespace kvasir {

struct HostLimits {
  int cpus = 1;                  // whole processors, at least 1
  double cpu_quota = 0;          // processors a control group grants, 0 when it sets none
  int64_t memory_total = 0;      // bytes in the machine
  int64_t memory_limit = 0;      // bytes this process may come to: the group's limit, or the machine's
  int64_t memory_available = 0;  // bytes it can still take before reclaim hurts or the group kills it
};

// `root` stands before /proc and /sys, so that tests can show it another machine.
HostLimits host_limits(const std::string& root = "");

int64_t resident_bytes();       // of this process, now
int64_t peak_resident_bytes();  // the most it has been

}  // namespace kvasir
