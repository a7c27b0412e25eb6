// Runs the real executable and reads what it says.
#pragma once

#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <string>

namespace kvasir::cli {

struct Ran {
  int code = -1;
  std::string out;  // stdout and stderr together
};

inline Ran shell(const std::string& arguments) {
  Ran r;
  FILE* pipe = popen((std::string(KVASIR_EXE) + " " + arguments + " 2>&1").c_str(), "r");
  std::array<char, 4096> buffer;
  while (size_t n = fread(buffer.data(), 1, buffer.size(), pipe)) r.out.append(buffer.data(), n);
  int status = pclose(pipe);
  r.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return r;
}

}  // namespace kvasir::cli
