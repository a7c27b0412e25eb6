#include <cstdio>

#include "build_info.h"
#include "cli/command.h"
#include "core/config.h"

namespace kvasir::cli {
namespace {

int version(int argc, char** argv) {
  bool brief = false;
  Options o("kvasir version", "Prints which kvasir this is: version, commit, compiler and build.");
  o.add("short", &brief, "Only the number").only_flag();
  o.example("kvasir version", "kvasir 0.1.0 and where it comes from");
  o.example("kvasir version --short", "0.1.0");
  if (auto code = o.parse(argc, argv)) return *code;
  if (brief) {
    std::puts(KVASIR_VERSION);
  } else {
    std::printf("kvasir %s\ncommit    %s\ncompiler  " __VERSION__ "\nbuild     %s, CUDA %s\n", KVASIR_VERSION,
                KVASIR_COMMIT, KVASIR_BUILD_TYPE, KVASIR_WITH_CUDA);
  }
  return kOk;
}

}  // namespace

extern const Command version_command;
const Command version_command{"version", "print the version, commit and build", version};

}  // namespace kvasir::cli
