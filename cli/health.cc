// kvasir health: is a server there and ready? The exit code is the answer, for containers and scripts.
#include <cstdio>

#include "cli/command.h"
#include "cli/http_get.h"
#include "core/config.h"

namespace kvasir::cli {
namespace {

int health(int argc, char** argv) {
  std::string host = "127.0.0.1";
  int http = 8000;
  bool live = false;
  std::chrono::milliseconds timeout{3000};
  Options o("kvasir health", "Asks a server whether it is ready: exit code 0 when it is, 1 when not.");
  o.add("host", &host, "Where the server is");
  o.add("http", &http, "Its HTTP port").range(1, 65535);
  o.add("live", &live, "Ask whether it lives (a server that loads or drains does) instead of whether it is ready");
  o.add("timeout", &timeout, "How long to wait for an answer").at_least(0.01);
  o.example("kvasir health", "the server of this machine, on port 8000");
  o.example("kvasir health --http 9000 --live && echo lives", "in a script");
  if (auto code = o.parse(argc, argv)) return *code;

  auto reply = http_get(host, http, live ? "/health" : "/ready", timeout);
  if (!reply.ok()) {
    std::fprintf(stderr, "kvasir health: %s\n", reply.status().message().c_str());
    return kFailed;
  }
  while (!reply->body.empty() && reply->body.back() == '\n') reply->body.pop_back();
  std::printf("%s\n", reply->body.c_str());
  return reply->status == 200 ? kOk : kFailed;
}

}  // namespace

extern const Command health_command;
const Command health_command{"health", "say whether a server is ready, by exit code", health};

}  // namespace kvasir::cli
