// kvasir completion SHELL: a script that completes commands and options. It asks each command's own --help,
// so that it knows what this very build has.
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cli/command.h"
#include "core/config.h"

namespace kvasir::cli {
namespace {

struct CommandWords {
  std::string name, summary;
  std::vector<std::string> options;
};

std::string output_of(const std::string& arguments) {
  std::unique_ptr<FILE, int (*)(FILE*)> pipe(
      popen(("/proc/" + std::to_string(getpid()) + "/exe " + arguments).c_str(), "r"), pclose);
  std::string out;
  char buffer[4096];
  while (size_t n = pipe ? fread(buffer, 1, sizeof buffer, pipe.get()) : 0) out.append(buffer, n);
  return out;
}

// Every "--word" at the beginning of a line's text is an option.
std::vector<std::string> options_in(const std::string& help) {
  std::vector<std::string> out;
  std::istringstream lines(help);
  for (std::string line; std::getline(lines, line);) {
    size_t at = line.find_first_not_of(' ');
    if (at == std::string::npos || at == 0 || line.compare(at, 2, "--") != 0) continue;
    size_t end = line.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-", at);
    out.push_back(line.substr(at, end == std::string::npos ? end : end - at));
  }
  return out;
}

std::vector<CommandWords> commands() {
  std::vector<CommandWords> out;
  std::istringstream lines(output_of("--help"));
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("  ", 0) != 0) continue;
    CommandWords w;
    size_t end = line.find(' ', 2);
    w.name = line.substr(2, end - 2);
    w.summary = line.substr(line.find_first_not_of(' ', end));
    w.options = options_in(output_of(w.name + " --help"));
    out.push_back(std::move(w));
  }
  return out;
}

std::string join(const std::vector<std::string>& words) {
  std::string out;
  for (const auto& w : words) out += (out.empty() ? "" : " ") + w;
  return out;
}

void bash(const std::vector<CommandWords>& all) {
  std::vector<std::string> names;
  names.reserve(all.size());
  for (const auto& w : all) names.push_back(w.name);
  std::printf(
      "_kvasir() {\n  local word=${COMP_WORDS[COMP_CWORD]}\n  COMPREPLY=()\n"
      "  if [ \"$COMP_CWORD\" -eq 1 ]; then\n    COMPREPLY=($(compgen -W '%s' -- \"$word\"))\n    return\n  fi\n"
      "  case $word in -*) ;; *) COMPREPLY=($(compgen -f -- \"$word\")); return ;; esac\n"
      "  case ${COMP_WORDS[1]} in\n",
      join(names).c_str());
  for (const auto& w : all)
    std::printf("    %s) COMPREPLY=($(compgen -W '%s' -- \"$word\")) ;;\n", w.name.c_str(), join(w.options).c_str());
  std::printf("  esac\n}\ncomplete -o filenames -F _kvasir kvasir\n");
}

void zsh(const std::vector<CommandWords>& all) {
  std::printf("#compdef kvasir\n_kvasir() {\n  if (( CURRENT == 2 )); then\n    local -a commands=(\n");
  for (const auto& w : all) std::printf("      '%s:%s'\n", w.name.c_str(), w.summary.c_str());
  std::printf(
      "    )\n    _describe command commands\n    return\n  fi\n"
      "  [[ $words[CURRENT] == -* ]] || { _files; return }\n  case $words[2] in\n");
  for (const auto& w : all) std::printf("    %s) compadd -- %s ;;\n", w.name.c_str(), join(w.options).c_str());
  std::printf("  esac\n}\ncompdef _kvasir kvasir\n");
}

void fish(const std::vector<CommandWords>& all) {
  for (const auto& w : all) {
    std::printf("complete -c kvasir -n __fish_use_subcommand -f -a %s -d '%s'\n", w.name.c_str(), w.summary.c_str());
    for (const auto& option : w.options)
      std::printf("complete -c kvasir -n '__fish_seen_subcommand_from %s' -l %s\n", w.name.c_str(), option.c_str() + 2);
  }
}

int completion(int argc, char** argv) {
  std::string shell;
  Options o("kvasir completion", "Prints a script that teaches a shell to complete kvasir's commands and options.");
  o.positional("shell", &shell, "bash, zsh or fish").one_of({"bash", "zsh", "fish"});
  o.example("source <(kvasir completion bash)", "for this shell");
  o.example("kvasir completion bash > ~/.local/share/bash-completion/completions/kvasir", "for all to come");
  o.example("kvasir completion fish > ~/.config/fish/completions/kvasir.fish", "fish");
  if (auto code = o.parse(argc, argv)) return *code;
  if (shell.empty()) {
    std::fprintf(stderr, "kvasir completion: which shell? bash, zsh or fish\n");
    return kUsage;
  }
  auto all = commands();
  if (shell == "bash") bash(all);
  if (shell == "zsh") zsh(all);
  if (shell == "fish") fish(all);
  return kOk;
}

}  // namespace

extern const Command completion_command;
const Command completion_command{"completion", "print a completion script for bash, zsh or fish", completion};

}  // namespace kvasir::cli
