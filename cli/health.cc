// kvasir health: is a server there and ready? The exit code is the answer, for containers and scripts.
#include <cstdio>

#include "cli/command.h"
#include "cli/grpc_health.h"
#include "cli/running_server.h"
#include "core/cat.h"
#include "core/config.h"

namespace kvasir::cli {
namespace {

struct HealthConfig {
  std::string host = "127.0.0.1", service;
  int http = 8000, grpc = 0, pid = 0;
  bool live = false;
  TlsFiles tls;
  std::chrono::milliseconds timeout{3000};

  // Flags only: where this stands beside a server, $KVASIR_HOST and $KVASIR_TLS_CERT are that server's.
  void define(Options& o) {
    o.add("host", &host, "Where the server is").only_flag();
    o.add("http", &http, "Its HTTP port").range(1, 65535).only_flag();
    o.add("grpc", &grpc, "Its gRPC port: ask there instead, by grpc.health.v1").range(0, 65535).only_flag();
    o.add("pid", &pid,
          "Ask the kvasir serve that runs as this process of this machine: its flags, its environment and its file say "
          "where it listens and whether that is TLS. In a container it is 1")
        .range(0, 1 << 22)
        .only_flag();
    o.add("service", &service, "Of a gRPC port: which service is meant; empty is the whole server")
        .value_name("NAME")
        .only_flag();
    o.add("live", &live, "Ask whether it lives (a server that loads or drains does) instead of whether it is ready")
        .only_flag();
    o.add("tls_ca", &tls.ca, "Speak TLS and trust this certificate (PEM)").value_name("FILE").only_flag();
    o.add("tls_cert", &tls.cert, "Certificate to show to a server that wants one").value_name("FILE").only_flag();
    o.add("tls_key", &tls.key, "Its private key").value_name("FILE").only_flag();
    o.add("timeout", &timeout, "How long to wait for an answer").at_least(0.01).only_flag();
    o.check([this, &o]() -> Status {
      if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
      if (tls.cert.empty() != tls.key.empty())
        return invalid_argument("tls_cert and tls_key go together: set both or neither");
      if (pid > 0) {
        for (const auto& option : o.all())
          for (const char* found : {"host", "http", "grpc", "tls_ca"})
            if (option->name() == found && option->source() != "default")
              return invalid_argument(cat("pid says by itself what ", option->flag(), " is; give one of them"));
      } else if (!tls.cert.empty() && tls.ca.empty()) {
        return invalid_argument("tls_cert needs tls_ca: whom to trust");
      }
      if (live && grpc > 0)
        return invalid_argument("live is a question of the HTTP port; gRPC's health says only whether it is ready");
      return {};
    });
    o.example("kvasir health", "the server of this machine, on port 8000");
    o.example("kvasir health --http 9000 --live && echo lives", "in a script");
    o.example("kvasir health --grpc 50051 --tls-ca ca.pem", "by gRPC, over TLS");
    o.example("kvasir health --pid 1", "the server of this container, however it was started");
  }

  // Puts in what `pid` stands for.
  Status find_server() {
    if (pid == 0) return {};
    KVASIR_ASSIGN(RunningServer server, running_server(pid));
    host = server.host;
    http = server.http_port, grpc = http > 0 ? 0 : server.grpc_port;
    if (live && http <= 0) return invalid_argument("live is a question of the HTTP port, which that server has not");
    tls.trust_anybody = server.tls;
    if (tls.cert.empty() && server.asks_for_certificates) tls.cert = server.tls_cert, tls.key = server.tls_key;
    return {};
  }
};

// What it says, and whether that is a yes.
Result<std::pair<std::string, bool>> ask(const HealthConfig& c) {
  if (c.grpc > 0) {
    KVASIR_ASSIGN(std::string state, grpc_health(c.host, c.grpc, c.service, c.tls, c.timeout));
    return std::pair(state, state == "SERVING");
  }
  KVASIR_ASSIGN(HttpReply reply, http_get(c.host, c.http, c.live ? "/health" : "/ready", c.tls, c.timeout));
  while (!reply.body.empty() && reply.body.back() == '\n') reply.body.pop_back();
  return std::pair(reply.body, reply.status == 200);
}

int health(int argc, char** argv) {
  HealthConfig config;
  Options o("kvasir health", "Asks a server whether it is ready: exit code 0 when it is, 1 when not.");
  config.define(o);
  if (auto code = o.parse(argc, argv)) return *code;
  Status found = config.find_server();
  auto answer = found.ok() ? ask(config) : found;
  if (!answer.ok()) {
    std::fprintf(stderr, "kvasir health: %s\n", answer.status().message().c_str());
    return kFailed;
  }
  std::printf("%s\n", answer->first.c_str());
  return answer->second ? kOk : kFailed;
}

}  // namespace

extern const Command health_command;
const Command health_command{"health", "say whether a server is ready, by exit code", health};

}  // namespace kvasir::cli
