// kvasir simulate: a workload through the real scheduler, with a cost model in place of the device.
#include <cstdio>
#include <fstream>
#include <iterator>

#include "cli/command.h"
#include "core/config.h"
#include "scheduler/policy.h"
#include "scheduler/simulate.h"

namespace kvasir::cli {
namespace {

Result<std::string> read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return not_found(cat("cannot open ", path));
  return std::string(std::istreambuf_iterator<char>(in), {});
}

Status run(const std::string& workload_file, const std::vector<std::string>& configs, const std::string& policy,
           const std::string& out) {
  KVASIR_ASSIGN(std::string text, read_file(workload_file));
  auto workload = scheduler::parse_workload(text);
  if (!workload.ok()) return Status(workload.status().code(), cat(workload_file, ", ", workload.status().message()));
  scheduler::Options options;
  options.groups = {{16384, 0}};
  options.max_context = 131072;
  options.max_running = 256;
  options.max_tokens_per_step = 2048;
  options.max_waiting = 1 << 20;
  options.max_waiting_tokens = int64_t(1) << 34;
  for (const std::string& file : configs) {
    KVASIR_ASSIGN(std::string json, read_file(file));
    KVASIR_TRY(scheduler::apply_json(json, &options, file));
  }
  std::vector<scheduler::SimReport> reports;
  for (const std::string& p : policy == "all" ? scheduler::policy_names() : std::vector{policy}) {
    options.policy = p;
    KVASIR_ASSIGN(auto report, scheduler::simulate(options, *workload));
    reports.push_back(std::move(report));
  }
  const std::string json = scheduler::to_json(reports);
  std::puts(json.c_str());
  if (out.empty()) return {};
  std::ofstream file(out), plot(out + ".svg");
  file << json << '\n';
  plot << scheduler::to_svg(reports);
  file.flush();
  plot.flush();
  if (!file || !plot) return Status(Code::unavailable, cat("cannot write ", out, " and ", out, ".svg"));
  return {};
}

int simulate(int argc, char** argv) {
  std::string workload, policy = "all", out;
  std::vector<std::string> configs;
  Options o("kvasir simulate", "Runs a workload through the scheduler with a cost model in place of the device.");
  o.add("workload", &workload,
        "JSONL, one request a line: arrival_s, prompt_tokens, output_tokens, and as wanted prefix_ids, tenant, "
        "priority, deadline_s, cancel_at_s (both after arrival), conversation, follows")
      .value_name("FILE")
      .only_flag();
  o.add("config", &configs, "JSON with pages, page_size, max_running ... and cost; more than one may be given")
      .value_name("FILE")
      .only_flag();
  std::vector<std::string> policies = scheduler::policy_names();
  policies.push_back("all");
  o.add("policy", &policy, "Which order of admission, or all of them side by side").one_of(policies).only_flag();
  o.add("out", &out, "Where to write the JSON, and a plot as FILE.svg").value_name("FILE").only_flag();
  o.check([&] { return workload.empty() ? invalid_argument("no --workload FILE was given") : Status(); });
  o.example("kvasir simulate --workload day.jsonl --config configs/cost/h200-8b-bf16.json --out day.json",
            "every policy's TTFT, ITL, goodput and fairness");
  if (auto code = o.parse(argc, argv)) return *code;
  Status status = run(workload, configs, policy, out);
  if (status.ok()) return kOk;
  std::fprintf(stderr, "kvasir simulate: %s\n", status.message().c_str());
  return status.code() == Code::invalid_argument || status.code() == Code::not_found ? kUsage : kFailed;
}

}  // namespace

extern const Command simulate_command;
const Command simulate_command{"simulate", "simulate the scheduler on a workload, policies side by side", simulate};

}  // namespace kvasir::cli
