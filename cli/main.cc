// kvasir COMMAND [options]: finds the command and runs it.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
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

// A closed standard stream would be the place of the next file or socket that is opened, and what is printed would go
// there. Reading and writing still fail where they are an error; what is said on standard error may be lost. Before any
// other initializer, for libraries open descriptors in theirs.
[[gnu::constructor(101)]] void open_standard_streams() {
  constexpr int kModes[] = {O_WRONLY, O_RDONLY, O_RDWR};
  for (int fd = 0; fd < 3; ++fd)
    if (fcntl(fd, F_GETFD) < 0 && errno == EBADF && open("/dev/null", kModes[fd]) != fd) std::_Exit(kFailed);
}

// What nobody could handle: that the machine has no thread or memory left is an error of its own, not of the program.
[[noreturn]] void end_of_means() {
  const char* what = nullptr;
  try {
    if (std::exception_ptr thrown = std::current_exception()) std::rethrow_exception(thrown);
  } catch (const std::bad_alloc&) {
    what = "there is no memory left: raise the limit (ulimit -v, the container's), or serve with less kv-memory";
  } catch (const std::system_error& e) {
    if (e.code() == std::errc::resource_unavailable_try_again)
      what = "no thread could be started: raise the limit of processes (ulimit -u, pids.max) or of memory";
  } catch (...) {
  }
  if (what == nullptr) std::abort();
  std::fprintf(stderr, "kvasir: %s\n", what);
  std::_Exit(kFailed);
}

// Libraries of others end the process without a word where they cannot have a thread or memory.
void say_that_it_aborts(int) {
  constexpr std::string_view kWords =
      "kvasir: aborted; where no reason stands above, a library had no thread or memory\n";
  [[maybe_unused]] const ssize_t said = write(STDERR_FILENO, kWords.data(), kWords.size());
}

}  // namespace
}  // namespace kvasir::cli

int main(int argc, char** argv) {
  std::set_terminate(kvasir::cli::end_of_means);
  struct sigaction abort {};
  abort.sa_handler = kvasir::cli::say_that_it_aborts;
  sigaction(SIGABRT, &abort, nullptr);
  kvasir::require_supported_cpu();  // linking it in also makes the check run before any static initializer
  return kvasir::cli::run(argc, argv);
}
