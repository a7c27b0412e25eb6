// A subcommand: its file defines `const Command NAME_command`, and CMakeLists.txt lists it.
#pragma once

namespace kvasir::cli {

// What a command returns to the shell.
constexpr int kOk = 0;
constexpr int kFailed = 1;  // it was asked well and could not
constexpr int kUsage = 2;   // it was asked wrongly

struct Command {
  const char* name;
  const char* summary;                // one line for `kvasir --help`
  int (*run)(int argc, char** argv);  // argv[0] is the command's own name
};

}  // namespace kvasir::cli
