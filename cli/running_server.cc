#include "cli/running_server.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <vector>

#include "cli/serve_config.h"
#include "core/cat.h"
#include "server/listen.h"

namespace kvasir::cli {
namespace {

// A file of /proc that holds texts, each ended by a zero.
Result<std::vector<std::string>> read_texts(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return not_found(cat(path, " cannot be read: ", std::strerror(errno)));
  std::vector<std::string> out;
  for (std::string one; std::getline(file, one, '\0');) out.push_back(std::move(one));
  return out;
}

// The address a server that listens on every interface is reached by from its own machine.
std::string reachable(std::string host) {
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  if (host == "::") return "::1";
  return host.empty() || host == "0.0.0.0" ? "127.0.0.1" : host;
}

}  // namespace

Result<RunningServer> running_server(int pid) {
  const std::string proc = cat("/proc/", pid);
  KVASIR_ASSIGN(auto words, read_texts(proc + "/cmdline"));
  KVASIR_ASSIGN(auto environment, read_texts(proc + "/environ"));
  // After the program's own name, and that of an init that may stand before it.
  const auto serve = std::find(words.begin() + !words.empty(), words.end(), "serve");
  if (serve == words.end())
    return invalid_argument(cat("process ", pid, " is no `kvasir serve`", words.empty() ? "" : " but ",
                                words.empty() ? "" : words[0].substr(0, 100),
                                "; give its ports instead: --http, --grpc"));
  if (chdir((proc + "/cwd").c_str()) != 0)  // where its file's name begins
    return unavailable(cat(proc, "/cwd cannot be entered: ", std::strerror(errno)));

  ServeConfig config;
  Options options("kvasir serve", "");
  config.define(options);
  KVASIR_TRY(options.load(std::vector(serve + 1, words.end()), [&](const char* name) -> const char* {
    const std::string start = cat(name, '=');
    for (const std::string& one : environment)
      if (one.starts_with(start)) return one.c_str() + start.size();
    return nullptr;
  }));
  const server::ServerOptions& o = config.server;
  if (o.http_port <= 0 && o.grpc_port <= 0)
    return invalid_argument(
        cat("process ", pid, " took a free port, which its log names: give it as --http or --grpc"));
  return RunningServer{.host = reachable(server::addresses(o.host).front()),
                       .http_port = o.http_port,
                       .grpc_port = o.grpc_port,
                       .tls = !o.tls_cert.empty(),
                       .asks_for_certificates = !o.tls_client_ca.empty(),
                       .tls_cert = o.tls_cert,
                       .tls_key = o.tls_key};
}

}  // namespace kvasir::cli
