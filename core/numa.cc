#include "core/numa.h"

#include <sched.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace kvasir {
namespace {

constexpr int kMostCpus = 1 << 14;

}  // namespace

std::vector<int> parse_cpu_list(const std::string& text) {
  std::vector<int> out;
  std::stringstream in(text);
  for (std::string part; std::getline(in, part, ',');) {
    std::stringstream range(part);
    int first = -1, last = -1;
    char dash = 0;
    if (!(range >> first)) continue;
    if (!(range >> dash >> last) || dash != '-') last = first;
    if (first < 0 || last >= kMostCpus) return {};
    for (int cpu = first; cpu <= last; ++cpu) out.push_back(cpu);
  }
  return out;
}

std::vector<NumaNode> numa_nodes(const std::string& root) {
  cpu_set_t allowed;
  const bool known = sched_getaffinity(0, sizeof allowed, &allowed) == 0;
  std::vector<NumaNode> out;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(root + "/sys/devices/system/node", error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("node") || name.size() < 5 || name.find_first_not_of("0123456789", 4) != std::string::npos)
      continue;
    std::ifstream file(entry.path() / "cpulist");
    std::string list;
    std::getline(file, list);
    NumaNode node{std::atoi(name.c_str() + 4), parse_cpu_list(list)};
    std::erase_if(node.cpus, [&](int cpu) { return known && (cpu >= CPU_SETSIZE || !CPU_ISSET(cpu, &allowed)); });
    if (!node.cpus.empty()) out.push_back(std::move(node));
  }
  std::sort(out.begin(), out.end(), [](const NumaNode& a, const NumaNode& b) { return a.number < b.number; });
  return out;
}

void run_on(const NumaNode& node) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int cpu : node.cpus)
    if (cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  (void)sched_setaffinity(0, sizeof set, &set);  // refused: where the scheduler likes
}

}  // namespace kvasir
