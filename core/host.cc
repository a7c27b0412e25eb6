#include "core/host.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <thread>
#include <vector>

namespace kvasir {
namespace {

std::string read_text(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// The number after `key` at the start of a line ("MemTotal:   123 kB"), or -1.
int64_t field(const std::string& text, const std::string& key) {
  std::stringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with(key)) return std::strtoll(line.c_str() + key.size(), nullptr, 10);
  return -1;
}

int64_t read_number(const std::string& path, int64_t otherwise) {
  std::ifstream file(path);
  int64_t value;
  return file >> value ? value : otherwise;  // "max" is no number
}

struct Group {
  std::string mount, path;  // mount + path is the group; its parents bind too
};

std::vector<std::string> with_parents(const Group& g) {
  std::vector<std::string> out;
  for (std::string path = g.path;; path.erase(path.rfind('/'))) {
    out.push_back(g.mount + path);
    if (path.empty() || path.find('/') == std::string::npos) break;
  }
  return out;
}

// Where this process' groups are mounted. Version 1 has one per controller, version 2 one for all.
// Inside a container the path may name a folder outside the mount: then the mount itself is our group.
Group find_group(const std::string& root, const std::string& controller) {
  Group v2{root + "/sys/fs/cgroup", ""}, v1;
  if (!std::ifstream(v2.mount + "/cgroup.controllers")) v2.mount = root + "/sys/fs/cgroup/unified";
  std::stringstream lines(read_text(root + "/proc/self/cgroup"));
  for (std::string line; std::getline(lines, line);) {
    size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    std::string names = line.substr(first + 1, second - first - 1), path = line.substr(second + 1);
    if (path == "/") path = "";
    if (names.empty()) {
      v2.path = path;
    } else if (("," + names + ",").find("," + controller + ",") != std::string::npos) {
      for (const std::string& mount : {root + "/sys/fs/cgroup/" + names, root + "/sys/fs/cgroup/" + controller})
        if (std::ifstream(mount + "/cgroup.procs")) v1 = {mount, path};
    }
  }
  Group& found = v1.mount.empty() ? v2 : v1;
  if (!std::ifstream(found.mount + found.path + "/cgroup.procs")) found.path.clear();
  return found;
}

double cpu_quota(const std::string& root) {
  double quota = 0;
  auto bind = [&](double q) { quota = quota == 0 ? q : std::min(quota, q); };
  for (const std::string& dir : with_parents(find_group(root, "cpu"))) {
    std::ifstream max(dir + "/cpu.max");  // "200000 100000" or "max 100000"
    double used, period;
    if (max >> used >> period && period > 0) bind(used / period);
    used = double(read_number(dir + "/cpu.cfs_quota_us", -1));
    period = double(read_number(dir + "/cpu.cfs_period_us", 0));
    if (used > 0 && period > 0) bind(used / period);
  }
  return quota;
}

// What may still be taken under each memory limit: page cache that nobody uses can go first.
void bind_memory(const std::string& root, HostLimits* host) {
  for (const std::string& dir : with_parents(find_group(root, "memory"))) {
    int64_t limit = read_number(dir + "/memory.max", read_number(dir + "/memory.limit_in_bytes", INT64_MAX));
    if (limit >= host->memory_total || limit < 0) continue;
    int64_t used = read_number(dir + "/memory.current", read_number(dir + "/memory.usage_in_bytes", 0));
    std::string stat = read_text(dir + "/memory.stat");
    int64_t cache = std::max(field(stat, "inactive_file "), field(stat, "total_inactive_file "));
    host->memory_limit = std::min(host->memory_limit, limit);
    int64_t free = limit - used + std::max<int64_t>(cache, 0);
    host->memory_available = std::clamp<int64_t>(free, 0, host->memory_available);
  }
}

int processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, int(std::thread::hardware_concurrency()));
}

}  // namespace

HostLimits host_limits(const std::string& root) {
  HostLimits host;
  host.cpus = processors();
  host.cpu_quota = cpu_quota(root);
  if (host.cpu_quota > 0) host.cpus = std::clamp(int(std::ceil(host.cpu_quota - 0.01)), 1, host.cpus);
  std::string memory = read_text(root + "/proc/meminfo");
  host.memory_total = host.memory_limit = field(memory, "MemTotal:") * 1024;
  host.memory_available = field(memory, "MemAvailable:") * 1024;
  bind_memory(root, &host);
  return host;
}

int64_t resident_bytes() { return field(read_text("/proc/self/status"), "VmRSS:") * 1024; }
int64_t peak_resident_bytes() { return field(read_text("/proc/self/status"), "VmHWM:") * 1024; }

}  // namespace kvasir
