// kvasir bench: load for any server that speaks kvasir.v1, ppl, VllmEngine or OpenAI's HTTP.
#include "client/bench.h"

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <sstream>

#include "cli/command.h"
#include "core/config.h"

namespace kvasir::cli {
namespace {

std::atomic<bool> interrupted{false};

void on_signal(int) {
  if (interrupted.exchange(true)) _exit(130);
}

bool write_file(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out << text;
  out.close();
  if (out) return true;
  std::fprintf(stderr, "kvasir bench: %s cannot be written\n", path.c_str());
  return false;
}

int compare_files(const std::vector<std::string>& files) {
  std::string text[2];
  for (int i = 0; i < 2; ++i) {
    std::ifstream in(files[i]);
    if (!in) {
      std::fprintf(stderr, "kvasir bench: %s cannot be opened\n", files[i].c_str());
      return kFailed;
    }
    text[i].assign(std::istreambuf_iterator<char>(in), {});
  }
  auto table = client::compare(text[0], text[1]);
  if (!table.ok()) {
    std::fprintf(stderr, "kvasir bench: %s\n", table.status().message().c_str());
    return kFailed;
  }
  std::printf("A = %s\nB = %s\n%s", files[0].c_str(), files[1].c_str(), table->c_str());
  return kOk;
}

void show(const std::string& what, const client::Progress& p) {
  std::fprintf(stderr, "\r  %s: %.0f s, %d under way, %d answered, %d failed, %.0f tokens a second \033[K",
               what.c_str(), p.seconds, p.started - p.finished - p.failed, p.finished, p.failed,
               p.seconds > 0 ? static_cast<double>(p.tokens) / p.seconds : 0);
}

int bench(int argc, char** argv) {
  client::BenchOptions b;
  std::vector<std::string> words;
  std::string slo, json, csv, html;
  bool compare = false;
  std::chrono::milliseconds duration{0};
  Options o("kvasir bench",
            "Puts a server under load and says how it did. Latency counts from when a request was due.");
  o.positional("target", &words, "HOST:PORT (default 127.0.0.1:50051); with --compare, two JSON reports");
  o.section("Server");
  o.add("protocol", &b.target.protocol, "What it speaks").one_of({"kvasir", "ppl", "vllm", "openai", "openai-chat"});
  o.add("model", &b.target.model, "Model to name in requests").only_flag();
  o.add("api_key", &b.target.api_key, "Key to show").secret();
  o.add("timeout", &b.target.timeout, "Most that one request may take").at_least(0.001).only_flag();
  o.add("connections", &b.target.connections, "gRPC connections").range(1, 256).only_flag();
  o.section("Load");
  o.add("concurrency", &b.concurrency, "Closed loop: clients that ask again when answered").range(1, 20000).only_flag();
  o.add("rate", &b.rate, "Open loop: requests a second, whatever is under way; 0 is the closed loop")
      .range(0, 1e6)
      .only_flag();
  o.add("arrival", &b.arrival.pattern, "How an open loop's requests come")
      .one_of({"poisson", "constant", "bursty", "ramp"})
      .only_flag();
  o.add("burstiness", &b.arrival.burstiness, "Of bursty: shape of the gaps; smaller is burstier")
      .range(0.01, 100)
      .only_flag();
  o.add("requests", &b.requests, "How many requests; 0: as many as fit in --duration").range(0, 5e6).only_flag();
  o.add("duration", &duration, "Nothing new starts after this; 0: no limit").at_least(0).only_flag();
  o.add("sweep", &b.sweep, "Find the highest load within --slo, by bisection")
      .one_of({"", "rate", "concurrency"})
      .only_flag();
  o.add("sweep_low", &b.sweep_low, "Where the sweep begins").range(0.01, 1e6).only_flag();
  o.add("sweep_high", &b.sweep_high, "Where it ends").range(0.01, 1e6).only_flag();
  o.section("Prompts");
  o.add("input_len", &b.workload.input_length, "Words: N, LOW-HIGH or lognormal:MEDIAN,SIGMA").only_flag();
  o.add("output_len", &b.workload.output_length, "Tokens, in the same forms").only_flag();
  o.add("shared_prefix", &b.workload.shared_prefix, "Words that the prompts of a group share")
      .range(0, 1e6)
      .only_flag();
  o.add("prefix_groups", &b.workload.prefix_groups, "Groups that share a prefix").range(1, 1e6).only_flag();
  o.add("turns", &b.turns, "Closed loop: each client asks again with all that was said before, this many times")
      .range(1, 1000)
      .only_flag();
  o.add("turn_len", &b.turn_words, "Words that each later turn adds").range(1, 1e6).only_flag();
  o.add("prompts", &b.workload.file,
        "JSONL of prompts, ShareGPT JSON or JSONL, an Azure (CSV) or Mooncake (JSONL) trace")
      .value_name("FILE")
      .only_flag();
  o.add("time_scale", &b.time_scale, "How much faster than recorded a trace is replayed").range(0.001, 1e6).only_flag();
  o.add("temperature", &b.temperature, "0 is greedy").range(0, 10).only_flag();
  o.add("ignore_eos", &b.ignore_eos, "Go on past the end of text, so that lengths are as asked").only_flag();
  o.add("seed", &b.seed, "Of prompts, arrivals and sampling").only_flag();
  o.section("Outcome");
  o.add("slo", &slo, "What counts as good: ttft=500ms,itl=50ms,e2e=10s").only_flag();
  o.add("slo_share", &b.slo_share, "Share of requests that a sweep wants within the SLO").range(0, 1).only_flag();
  o.add("verify", &b.verify, "Ask this many again, each alone, and compare the texts").range(0, 1e6).only_flag();
  o.add("json", &json, "Write a JSON report").value_name("FILE").only_flag();
  o.add("csv", &csv, "Write a row for each request").value_name("FILE").only_flag();
  o.add("html", &html, "Write a page with plots").value_name("FILE").only_flag();
  o.add("compare", &compare, "Set two JSON reports side by side").only_flag();
  o.example("kvasir bench 127.0.0.1:50051 --rate 2 --requests 200 --html report.html",
            "open loop, with a page of plots");
  o.example("kvasir bench 127.0.0.1:8000 --protocol openai --concurrency 32", "32 clients of any OpenAI server");
  o.example("kvasir bench --sweep rate --slo ttft=500ms,itl=50ms", "the most requests a second within an SLO");
  o.example("kvasir bench --compare before.json after.json", "two runs side by side");
  if (auto code = o.parse(argc, argv)) return *code;

  if (compare) {
    if (words.size() == 2) return compare_files(words);
    std::fprintf(stderr, "kvasir bench: --compare takes two reports, not %zu\n", words.size());
    return kUsage;
  }
  if (b.turns > 1 && (b.rate > 0 || !b.sweep.empty())) {
    std::fprintf(stderr, "kvasir bench: --turns is for the closed loop: leave out --rate and --sweep\n");
    return kUsage;
  }
  if (words.size() > 1) {
    std::fprintf(stderr, "kvasir bench: one HOST:PORT is taken, not %zu\n", words.size());
    return kUsage;
  }
  auto goals = client::parse_slo(slo);
  if (!goals.ok() || (!b.sweep.empty() && !goals->any())) {
    std::fprintf(
        stderr, "kvasir bench: %s\n",
        goals.ok() ? "--sweep needs --slo, for example ttft=500ms,itl=50ms" : goals.status().message().c_str());
    return kUsage;
  }
  b.slo = *goals;
  b.duration = std::chrono::duration<double>(duration).count();
  b.workload.seed = b.seed;
  const bool http = b.target.protocol.starts_with("openai");
  b.target.address = words.empty() ? (http ? "127.0.0.1:8000" : "127.0.0.1:50051") : words[0];

  auto target = client::make_target(b.target);
  if (!target.ok()) {
    std::fprintf(stderr, "kvasir bench: %s\n", target.status().message().c_str());
    return kFailed;
  }
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
  const bool terminal = isatty(STDERR_FILENO);
  auto done = client::run_bench(**target, b, interrupted, terminal ? client::OnProgress(show) : client::OnProgress());
  if (terminal) std::fprintf(stderr, "\r\033[K");
  if (!done.ok()) {
    std::fprintf(stderr, "kvasir bench: %s\n", done.status().message().c_str());
    return kFailed;
  }

  client::Report& r = done->report;
  char date[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%d %H:%M:%S", std::localtime(&now));
  r.date = date;
  for (int i = 0; i < argc; ++i) {
    const bool key = i > 0 && std::string(argv[i - 1]) == "--api-key";
    r.command +=
        (i ? " " : "kvasir ") + std::string(key || std::string(argv[i]).starts_with("--api-key=") ? "..." : argv[i]);
  }
  std::printf("%s", client::table_of(r.figures).c_str());
  if (b.slo.any()) {
    std::printf("  %-22s %.1f%% of requests, %.2f a second\n", "within the SLO", r.figures.within_slo * 100,
                r.figures.goodput);
  }
  for (const client::Point& p : r.points) {
    std::printf("  %s %-10.4g %s %8.1f tokens/s  ttft p99 %8.1f ms  itl p99 %7.1f ms  %.1f%% within\n", r.sweep.c_str(),
                p.load, p.within ? "good" : "bad ", p.figures.output_per_second, p.figures.ttft.p99 * 1e3,
                p.figures.itl.p99 * 1e3, p.figures.within_slo * 100);
  }
  if (!b.sweep.empty()) std::printf("  highest %s within the SLO: %.4g\n", r.sweep.c_str(), r.best);
  const client::Verification& v = r.verification;
  if (v.compared > 0) {
    std::printf("  %-22s %d compared, %d equal, %d near-ties, %d different, %d failed\n", "verified alone", v.compared,
                v.equal, v.near_ties, v.different, v.failed);
    for (const std::string& example : v.examples) std::printf("    %s\n", example.c_str());
  }
  bool written = true;
  if (!json.empty()) written &= write_file(json, client::json_of(r));
  if (!csv.empty()) written &= write_file(csv, client::csv_of(done->run));
  if (!html.empty()) written &= write_file(html, client::html_of(r));
  const bool right = v.different == 0 && v.failed == 0;
  std::fflush(stdout);
  // Calls cut off by an interrupt may still be under way; they are not waited for.
  if (r.figures.partial) _exit(kFailed);
  return written && right && r.figures.good > 0 ? kOk : kFailed;
}

}  // namespace

extern const Command bench_command;
const Command bench_command{"bench", "put a server under load and report how it did", bench};

}  // namespace kvasir::cli
