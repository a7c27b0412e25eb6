// kvasir simulate: a workload through the real scheduler, with a cost model in place of the device; or a recording
// again, plan by plan.
#include <cstdio>
#include <fstream>
#include <iterator>

#include "cli/command.h"
#include "core/config.h"
#include "scheduler/apart.h"
#include "scheduler/options_json.h"
#include "scheduler/policy.h"
#include "scheduler/recording.h"
#include "scheduler/simulate.h"

namespace kvasir::cli {
namespace {

struct SimulateConfig {
  std::string workload, policy = "auto", out, fit, machine;
  std::vector<std::string> configs;
  scheduler::Pools pools;

  bool apart() const { return pools.prefill > 0 || pools.decode > 0; }
};

Result<std::string> read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return not_found(cat("cannot open ", path));
  return std::string(std::istreambuf_iterator<char>(in), {});
}

Status in_file(const std::string& file, const Status& s) { return Status(s.code(), cat(file, ", ", s.message())); }

Status write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text << '\n';
  file.flush();
  return file ? Status() : Status(Code::unavailable, cat("cannot write ", path));
}

// The machine that is simulated when no --config says otherwise.
scheduler::Settings default_machine() {
  scheduler::Settings options;
  options.groups = {{16384, 0}};
  options.max_context = 131072;
  options.max_running = 256;
  options.max_tokens_per_step = 2048;
  options.max_waiting = 1 << 20;
  options.max_waiting_tokens = int64_t(1) << 34;
  return options;
}

Status replay(const SimulateConfig& c, std::istream& recording) {
  std::vector<scheduler::StepTime> steps;
  auto report = scheduler::replay(recording, c.fit.empty() ? nullptr : &steps);
  if (!report.ok()) return in_file(c.workload, report.status());
  const std::string json = scheduler::to_json(*report);
  std::puts(json.c_str());
  if (!c.out.empty()) KVASIR_TRY(write_file(c.out, json));
  if (!report->identical)
    return failed_precondition(cat(c.workload, " does not replay as it was recorded: ", report->difference));
  if (c.fit.empty()) return {};
  auto fit = scheduler::fit_cost(steps);
  if (!fit.ok()) return in_file(c.workload, fit.status());
  return write_file(c.fit, scheduler::to_json(*fit, report->about.empty() ? "a recording" : report->about));
}

std::vector<std::string> policies_of(const SimulateConfig& c) {
  return c.policy == "auto" || c.policy == "all" ? scheduler::policy_names() : std::vector{c.policy};
}

Status simulate_pools(const SimulateConfig& c, scheduler::Settings options, const scheduler::SimWorkload& workload,
                      const scheduler::StepCost* machine) {
  std::vector<scheduler::ApartReport> reports;
  for (const std::string& p : policies_of(c)) {
    options.policy = p;
    KVASIR_ASSIGN(auto report, scheduler::simulate_apart(options, workload, c.pools, machine));
    reports.push_back(std::move(report));
  }
  const std::string json = scheduler::to_json(reports);
  std::puts(json.c_str());
  return c.out.empty() ? Status() : write_file(c.out, json);
}

Status simulate_with(const SimulateConfig& c, scheduler::Settings options, const scheduler::SimWorkload& workload) {
  for (const std::string& file : c.configs) {
    KVASIR_ASSIGN(std::string json, read_file(file));
    KVASIR_TRY(scheduler::apply_json(json, &options, file));
  }
  scheduler::Settings machine;  // of which only the cost counts
  if (!c.machine.empty()) {
    KVASIR_ASSIGN(std::string json, read_file(c.machine));
    KVASIR_TRY(scheduler::apply_json(json, &machine, c.machine));
  }
  if (c.apart()) return simulate_pools(c, options, workload, c.machine.empty() ? nullptr : &machine.cost);
  std::vector<scheduler::SimReport> reports;
  for (const std::string& p : policies_of(c)) {
    options.policy = p;
    KVASIR_ASSIGN(auto report, scheduler::simulate(options, workload, c.machine.empty() ? nullptr : &machine.cost));
    reports.push_back(std::move(report));
  }
  const std::string json = scheduler::to_json(reports);
  std::puts(json.c_str());
  if (c.out.empty()) return {};
  KVASIR_TRY(write_file(c.out, json));
  return write_file(c.out + ".svg", scheduler::to_svg(reports));
}

Status run(const SimulateConfig& c) {
  std::ifstream in(c.workload, std::ios::binary);
  std::string first_line;
  if (!in) return not_found(cat("cannot open ", c.workload));
  std::getline(in, first_line);
  in.clear();
  in.seekg(0);
  if (scheduler::is_recording(first_line)) {
    if (c.policy == "auto" && c.configs.empty() && c.machine.empty() && !c.apart()) return replay(c, in);
    if (!c.fit.empty())
      return invalid_argument(
          "--fit takes the times of a recording as it was: leave out --policy and --config, and --machine");
    auto recorded = scheduler::read_workload(in);
    if (!recorded.ok()) return in_file(c.workload, recorded.status());
    return simulate_with(c, recorded->options, recorded->workload);
  }
  if (!c.fit.empty())
    return invalid_argument("--fit needs a recording: one that serve or generate wrote with --record");
  std::string text(std::istreambuf_iterator<char>(in), {});
  auto workload = scheduler::parse_workload(text);
  if (!workload.ok()) return in_file(c.workload, workload.status());
  return simulate_with(c, default_machine(), *workload);
}

int simulate(int argc, char** argv) {
  SimulateConfig c;
  Options o("kvasir simulate",
            "Replays a recording and checks that every plan is the same; or runs a workload through the scheduler with "
            "a cost model in place of the device.");
  o.add("workload", &c.workload,
        "What serve --record wrote; or JSONL, one request a line: arrival_s, prompt_tokens, output_tokens, and as "
        "wanted prefix_ids, tenant, priority, deadline_s, cancel_at_s (both after arrival), conversation, follows")
      .value_name("FILE")
      .only_flag();
  o.add("config", &c.configs,
        "JSON with pages, page_size, max_running ... and cost; more than one may be given. A recording is then "
        "simulated, not replayed")
      .value_name("FILE")
      .only_flag();
  o.add("machine", &c.machine,
        "JSON with the cost of the machine that is simulated, where the scheduler is to expect another one (that of "
        "--config) and learn")
      .value_name("FILE")
      .only_flag();
  std::vector<std::string> policies = scheduler::policy_names();
  policies.insert(policies.end(), {"all", "auto"});
  o.add("policy", &c.policy,
        "Which order of admission, or all of them side by side; auto is all, and for a recording a replay")
      .one_of(policies)
      .only_flag();
  o.add("out", &c.out, "Where to write the JSON, and a plot as FILE.svg").value_name("FILE").only_flag();
  o.add("prefill_pool", &c.pools.prefill,
        "So many machines compute prompts and as many as --decode-pool says what follows, beside as many that do both; "
        "0: one machine that does both")
      .range(0, 10000)
      .only_flag();
  o.add("decode_pool", &c.pools.decode, "Machines that compute what follows a prompt").range(0, 10000).only_flag();
  o.add("link_gbps", &c.pools.link_gbps, "Gigabits a second from a machine that computes prompts to the others")
      .range(0, 1e6)
      .only_flag();
  o.add("kv_bytes_per_token", &c.pools.bytes_per_token, "Bytes of a token in the cache, which cross the link")
      .range(0, int64_t(1) << 40)
      .only_flag();
  o.add("fit", &c.fit, "Fit a cost model to the times of a recording's steps and write it, for --config")
      .value_name("FILE")
      .only_flag();
  o.check([&]() -> Status {
    if (c.workload.empty()) return invalid_argument("no --workload FILE was given");
    const bool any = c.apart() || c.pools.link_gbps > 0 || c.pools.bytes_per_token > 0;
    if (any && (c.pools.prefill < 1 || c.pools.decode < 1 || c.pools.link_gbps <= 0 || c.pools.bytes_per_token < 1))
      return invalid_argument(
          "two pools are said by four flags: --prefill-pool, --decode-pool, --link-gbps and --kv-bytes-per-token, each "
          "above 0");
    return {};
  });
  o.example("kvasir simulate --workload day.jsonl --config configs/cost/h200-8b-bf16.json --out day.json",
            "every policy's TTFT, ITL, goodput and fairness");
  o.example(
      "kvasir simulate --workload day.jsonl --config configs/cost/h200-8b-bf16.json --policy fcfs --prefill-pool 1 "
      "--decode-pool 3 --link-gbps 400 --kv-bytes-per-token 131072",
      "whether prefill and decode on machines of their own would pay");
  o.example("kvasir simulate --workload run.rec", "the scheduler makes the plans it made when this was recorded");
  o.example("kvasir simulate --workload run.rec --fit cost.json", "and what its steps cost");
  o.example("kvasir simulate --workload run.rec --policy all --config cost.json", "the same requests, other policies");
  if (auto code = o.parse(argc, argv)) return *code;
  Status status = run(c);
  if (status.ok()) return kOk;
  std::fprintf(stderr, "kvasir simulate: %s\n", status.message().c_str());
  return status.code() == Code::invalid_argument || status.code() == Code::not_found ? kUsage : kFailed;
}

}  // namespace

extern const Command simulate_command;
const Command simulate_command{"simulate", "simulate the scheduler on a workload, policies side by side", simulate};

}  // namespace kvasir::cli
