// kvasir COMMAND [options]: finds the command and runs it.
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "cli/command.h"
#include "core/config.h"
#include "core/cpu.h"

namespace kvasir::cli {

#define KVASIR_COMMAND(name) extern const Command name##_command;
#include "commands.inc"
#undef KVASIR_COMMAND

namespace {

const Command* const kCommands[] = {
#define KVASIR_COMMAND(name) &name##_command,
#include "commands.inc"
#undef KVASIR_COMMAND
};

void usage(FILE* to) {
  std::fprintf(to,
               "kvasir: serves a language model to many clients at once, over gRPC and HTTP.\n\n"
               "usage: kvasir COMMAND [options]\n\n");
  for (const Command* c : kCommands) std::fprintf(to, "  %-11s %s\n", c->name, c->summary);
  std::fprintf(to, "\n`kvasir COMMAND --help` shows its options, with examples.\n");
}

const Command* find(std::string_view name) {
  for (const Command* c : kCommands)
    if (name == c->name) return c;
  return nullptr;
}

int unknown(std::string_view name) {
  std::vector<std::string> names;
  for (const Command* c : kCommands) names.push_back(c->name);
  std::fprintf(stderr, "kvasir: there is no command '%.*s'", int(name.size()), name.data());
  if (auto close = nearest_name(name, names); !close.empty())
    std::fprintf(stderr, "; did you mean '%.*s'?", int(close.size()), close.data());
  std::fprintf(stderr, "\n`kvasir --help` lists them.\n");
  return kUsage;
}

int run(int argc, char** argv) {
  if (argc < 2) {
    usage(stderr);
    return kUsage;
  }
  std::string_view name = argv[1];
  if (name == "--help" || name == "-h" || (name == "help" && argc == 2)) {
    usage(stdout);
    return kOk;
  }
  if (name == "help") {  // kvasir help serve
    const Command* c = find(argv[2]);
    if (!c) return unknown(argv[2]);
    char help[] = "--help";
    char* args[] = {argv[2], help, nullptr};
    return c->run(2, args);
  }
  if (name == "--version" || name == "-V") name = "version";
  const Command* c = find(name);
  if (!c) return unknown(name);
  return c->run(argc - 1, argv + 1);
}

}  // namespace
}  // namespace kvasir::cli

int main(int argc, char** argv) {
  kvasir::require_supported_cpu();  // linking it in also makes the check run before any static initializer
  return kvasir::cli::run(argc, argv);
}
