// kvasir api: what a request may say, protocol by protocol, as the tables of docs/api.md (tools/reference puts them
// there).
#include <cstdio>

#include "cli/command.h"
#include "core/config.h"
#include "server/http/api.h"
#include "server/parameters.h"

namespace kvasir::cli {
namespace {

int api(int argc, char** argv) {
  std::string table = "parameters";
  Options o("kvasir api", "Prints a table of what this server's protocols take, in Markdown.");
  o.positional("table", &table, "parameters: of a request, protocol by protocol; routes: those of the HTTP port")
      .one_of({"parameters", "routes"});
  o.example("kvasir api routes", "which paths there are, whose each is, and who may call it");
  if (auto code = o.parse(argc, argv)) return *code;
  const std::string text = table == "routes" ? server::http::routes_markdown() : server::parameters_markdown();
  std::fwrite(text.data(), 1, text.size(), stdout);
  return kOk;
}

}  // namespace

extern const Command api_command;
const Command api_command{"api", "print the tables of parameters and routes", api};

}  // namespace kvasir::cli
