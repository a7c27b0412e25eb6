// The machine's nodes of memory, each with processors that reach it fastest.
#pragma once

#include <string>
#include <vector>

namespace kvasir {

struct NumaNode {
  int number = 0;
  std::vector<int> cpus;  // those that this process may use
};

// Nodes without such processors are left out. `root` stands before /sys, as in host.h.
std::vector<NumaNode> numa_nodes(const std::string& root = "");

// The calling thread, and those it starts, stay on this node.
void run_on(const NumaNode& node);

// "0-3,8,10-11", as the kernel writes sets of processors; what is no such list is none.
std::vector<int> parse_cpu_list(const std::string& text);

}  // namespace kvasir
