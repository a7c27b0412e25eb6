// Any bytes as a configuration file, as a flag's value and as text for the log: an answer, never a crash.
#include <cstdint>
#include <cstdlib>

#include "core/config.h"
#include "core/log.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvasir;
  std::string text(reinterpret_cast<const char*>(data), size);
  int port = 8000;
  bool on = true;
  double share = 0.5;
  std::string policy = "fair";
  ByteSize memory;
  std::chrono::milliseconds drain{1000};
  std::vector<std::string> names;
  auto define = [&](Options& o) {
    o.with_config_file();
    o.add("http_port", &port, "a port").range(0, 65535);
    o.add("on", &on, "a switch");
    o.add("share", &share, "a share").range(0, 1);
    o.add("policy", &policy, "a choice").one_of({"fair", "fcfs"});
    o.add("memory", &memory, "a size");
    o.add("drain", &drain, "a time").range(0, 3600);
    o.add("names", &names, "a list");
  };
  Options options("fuzz", "");
  define(options);
  if (options.load_json(text, "fuzz").ok()) {
    // What was accepted is in range, and printing it gives a file that is accepted again.
    if (port < 0 || port > 65535 || !(share >= 0 && share <= 1)) abort();
    std::string printed = options.print_config();
    Options again("fuzz", "");
    define(again);
    if (!again.load_json(printed, "printed").ok() || again.print_config().empty()) abort();
  }
  std::vector<std::string> args{"--memory", text.substr(0, 64), "--drain=" + text.substr(0, 64),
                                "--" + text.substr(0, 64)};
  (void)options.load_flags(args);
  std::string line = format_log_line(true, 0, LogLevel::info, text, {{"text", text}});
  for (char c : line)
    if (static_cast<unsigned char>(c) < 0x20) abort();
  return 0;
}
