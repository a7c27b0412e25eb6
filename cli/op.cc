// kvasir op: one stored operator case through one back end, for comparing back ends and for bug reports.
#include <cstdio>

#include "attention/cases/stored_case.h"
#include "cli/command.h"
#include "core/config.h"

namespace kvasir::cli {
namespace {

int op(int argc, char** argv) {
  std::string folder, backend = "cpu", out;
  int threads = 1;
  Options o("kvasir op", "Runs one stored case of a cache-attention operator (docs/attention-ops.md, section 11).");
  o.positional("case_dir", &folder, "Folder with case.json and one .npy a tensor").value_name("CASE_DIR");
  o.add("backend", &backend, "What computes it: reference, cpu or cuda").only_flag();
  o.add("out", &out, "Folder for the results; it is made, and nothing is written unless all went well")
      .value_name("DIR")
      .only_flag();
  o.add("threads", &threads, "Threads of a host back end; the bytes are the same for any number")
      .range(1, 1024)
      .only_flag();
  o.check([&] {
    if (folder.empty()) return invalid_argument("no CASE_DIR was given").with_field("case_dir");
    if (out.empty()) return invalid_argument("no --out DIR was given").with_field("out");
    return Status();
  });
  o.example("kvasir op case --backend reference --out result", "attn_output, cache, ... as result/*.npy");
  if (auto code = o.parse(argc, argv)) return *code;

  auto found = attention::find_backend(backend);
  Status status = found.status();
  if (status.ok()) {
    ThreadPool pool(threads);
    status = attention::run_folder(folder, **found, {&pool, nullptr}, out);
  }
  if (status.ok()) return kOk;
  std::fprintf(stderr, "kvasir op: %s\n", status.message().c_str());
  const bool refused = status.code() == Code::invalid_argument || status.code() == Code::not_found ||
                       status.code() == Code::failed_precondition;
  return refused ? kUsage : kFailed;
}

}  // namespace

extern const Command op_command;
const Command op_command{"op", "run one stored attention case through a back end", op};

}  // namespace kvasir::cli
