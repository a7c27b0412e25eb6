// kvasir bench: load for any server that speaks kvasir.v1, ppl, VllmEngine or OpenAI's HTTP.
#include "client/bench.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>

#include "cli/command.h"
#include "core/config.h"

namespace kvasir::cli {
namespace {

std::atomic<bool> interrupted{false};

void on_signal(int) {
  if (interrupted.exchange(true)) _exit(130);
}

int complain(const std::string& what, int code) {
  std::fprintf(stderr, "kvasir bench: %s\n", what.c_str());
  return code;
}

struct BenchConfig {
  client::BenchOptions b;
  std::vector<std::string> words;
  std::string slo, json, csv, html, answers;
  bool compare = false;
  std::chrono::milliseconds duration{0};
  const Options* given = nullptr;

  void define(Options& o) {
    given = &o;
    o.positional("target", &words, "HOST:PORT (default 127.0.0.1:50051, HTTP 8000); with --compare, two JSON reports");
    o.section("Server");
    o.add("protocol", &b.target.protocol, "What it speaks: gRPC (ours, ppl's, vLLM's) or OpenAI's HTTP")
        .one_of({"kvasir", "ppl", "vllm", "openai", "openai-chat"});
    o.add("model", &b.target.model, "Model to name in requests").only_flag();
    o.add("api_key", &b.target.api_key, "Key to show").secret();
    o.add("tls", &b.target.tls.on, "Speak TLS, trusting the system's authorities").only_flag();
    o.add("tls_ca", &b.target.tls.ca, "Speak TLS, trusting this authority (PEM)").value_name("FILE").only_flag();
    o.add("tls_cert", &b.target.tls.cert, "Our certificate, for a server that asks for one (PEM)")
        .value_name("FILE")
        .only_flag();
    o.add("tls_key", &b.target.tls.key, "Its private key (PEM)").value_name("FILE").only_flag();
    o.add("timeout", &b.target.timeout, "Most that one request may take").at_least(0.001).only_flag();
    o.add("connections", &b.target.connections, "gRPC connections").range(1, 256).only_flag();
    o.add("metrics", &b.target.metrics, "Prometheus page to read beside, once a second; else what the protocol has")
        .value_name("HOST:PORT")
        .only_flag();
    define_load(o);
    define_prompts(o);
    define_outcome(o);
    o.example("kvasir bench", "is it fast? 8 clients, 100 requests of 128 words, on this machine's server");
    o.example("kvasir bench --rate 2 --duration 5m --html report.html",
              "what users see: requests come on their own, latency counts from when each was due");
    o.example("kvasir bench 10.0.0.7:8000 --protocol openai --concurrency 32", "any OpenAI server, 32 clients");
    o.example("kvasir bench --sweep rate --slo ttft=500ms,itl=50ms", "how much it carries: the most requests a second");
    o.example("kvasir bench --rate 2 --duration 10m --verify 50", "and are the answers under load the right ones?");
    o.example("kvasir bench --shared-prefix 1000 --prefix-groups 4",
              "what the prefix cache saves: see the cached tokens");
    o.example("kvasir bench --prompts AzureLLMInferenceTrace_conv.csv --time-scale 10",
              "a recorded day, ten times faster");
    o.example("kvasir bench --json new.json && kvasir bench --compare old.json new.json", "did a change help?");
  }

  void define_load(Options& o) {
    o.section("Load");
    o.add("concurrency", &b.concurrency,
          "Closed loop: so many clients, each asks again when answered; the times of a trace are then left aside")
        .range(1, 20000)
        .only_flag();
    o.add("rate", &b.rate, "Open loop: requests a second (conversations, with --turns), however many are under way")
        .range(0, 1e6)
        .only_flag();
    o.add("arrival", &b.arrival.pattern, "How an open loop's requests come; at-once needs no --rate")
        .one_of({"poisson", "constant", "bursty", "ramp", "at-once"})
        .only_flag();
    o.add("burstiness", &b.arrival.burstiness, "Of bursty: shape of the gaps; smaller is burstier")
        .range(0.01, 100)
        .only_flag();
    o.add("batch", &b.batch, "Of ppl: requests that are due together go in one call, at most so many")
        .range(1, 4096)
        .only_flag();
    o.add("requests", &b.requests, "How many; 0: what fits in --duration, or all of a file or trace, or else 100")
        .range(0, 5e6)
        .only_flag();
    o.add("duration", &duration, "Nothing new starts after this; 0: no limit").at_least(0).only_flag();
    o.add("sweep", &b.sweep, "Find the highest load within --slo, by bisection; --duration is each probe's")
        .one_of({"", "rate", "concurrency"})
        .only_flag();
    o.add("sweep_low", &b.sweep_low, "Where the sweep begins").range(0.01, 1e6).only_flag();
    o.add("sweep_high", &b.sweep_high, "Where it ends").range(0.01, 1e6).only_flag();
  }

  void define_prompts(Options& o) {
    o.section("Prompts");
    o.add("input_len", &b.workload.input_length, "Words, about a token each: N, LOW-HIGH or lognormal:MEDIAN,SIGMA")
        .only_flag();
    o.add("output_len", &b.workload.output_length, "Tokens, in the same forms").only_flag();
    o.add("shared_prefix", &b.workload.shared_prefix, "Words that the prompts of a group share")
        .range(0, 1e6)
        .only_flag();
    o.add("prefix_groups", &b.workload.prefix_groups, "Groups that share a prefix").range(1, 1e6).only_flag();
    o.add("turns", &b.turns,
          "Turns of a conversation: each asks with all that was said before; ShareGPT's own where a file has them")
        .range(1, 1000)
        .only_flag();
    o.add("turn_len", &b.turn_words, "Words that each other later turn adds").range(1, 1e6).only_flag();
    o.add("prompts", &b.workload.file,
          "JSONL of prompts, ShareGPT JSON or JSONL, an Azure (CSV) or Mooncake (JSONL) trace")
        .value_name("FILE")
        .only_flag();
    o.add("time_scale", &b.time_scale, "How much faster than recorded a trace is replayed")
        .range(0.001, 1e6)
        .only_flag();
    o.add("temperature", &b.temperature, "0 is greedy").range(0, 10).only_flag();
    o.add("ignore_eos", &b.ignore_eos, "Go on past the end of text, so that lengths are as asked").only_flag();
    o.add("seed", &b.seed, "Of prompts, arrivals and sampling").only_flag();
  }

  void define_outcome(Options& o) {
    o.section("Outcome");
    o.add("slo", &slo, "What counts as good: ttft=500ms,itl=50ms,e2e=10s (any of them)").only_flag();
    o.add("slo_share", &b.slo_share, "Share of requests that a sweep wants within the SLO").range(0, 1).only_flag();
    o.add("verify", &b.verify, "Ask this many again, each alone, and compare; near-ties are counted apart")
        .range(0, 1e6)
        .only_flag();
    o.add("html", &html, "Write a page with plots, which needs no network").value_name("FILE").only_flag();
    o.add("json", &json, "Write a JSON report, for --compare and for scripts").value_name("FILE").only_flag();
    o.add("csv", &csv, "Write a row for each request").value_name("FILE").only_flag();
    o.add("answers", &answers, "Write prompts and answers as JSON lines; - is the terminal")
        .value_name("FILE")
        .only_flag();
    o.add("compare", &compare, "Set two JSON reports side by side").only_flag();
  }

  bool says(std::string_view name) const {
    return std::any_of(given->all().begin(), given->all().end(),
                       [&](const auto& option) { return option->name() == name && option->source() == "flag"; });
  }

  // A flag that would change nothing is a misunderstanding, and figures of a load that was not asked for.
  Status check_use() const {
    const bool at_once = b.arrival.pattern == "at-once", open = b.rate > 0 || at_once, sweep = !b.sweep.empty();
    const bool file = !b.workload.file.empty(), http = b.target.protocol.starts_with("openai");
    const struct {
      const char* name;
      bool used;
      const char* needs;
    } kUses[] = {
        {"concurrency", !open && !sweep, "a closed loop: leave out --rate, --arrival at-once and --sweep"},
        {"rate", !at_once, "another --arrival than at-once"},
        {"arrival", open || b.sweep == "rate", "an open loop: --rate, or --sweep rate"},
        {"burstiness", b.arrival.pattern == "bursty", "--arrival bursty"},
        {"sweep_low", sweep, "--sweep"},
        {"sweep_high", sweep, "--sweep"},
        {"slo_share", b.slo.any(), "--slo"},
        {"input_len", !file, "prompts that are made up: leave out --prompts"},
        {"shared_prefix", !file, "prompts that are made up: leave out --prompts"},
        {"prefix_groups", b.workload.shared_prefix > 0, "--shared-prefix"},
        {"turn_len", b.turns > 1, "--turns"},
        {"time_scale", file && !open && !sweep && !b.closed, "the times of a trace: --prompts without another load"},
        {"connections", !http, "a protocol over gRPC"},
        {"model", http || b.target.protocol == "kvasir", "a protocol that names models: kvasir, openai or openai-chat"},
    };
    for (const auto& [name, used, needs] : kUses)
      if (says(name) && !used) return invalid_argument(cat(name, " would change nothing here; it needs ", needs));
    return {};
  }

  // What no single value shows to be wrong.
  Status settle() {
    if (words.size() > 1) return invalid_argument(cat("one HOST:PORT is taken, not ", words.size()));
    KVASIR_ASSIGN(b.slo, client::parse_slo(slo));
    if (!b.sweep.empty() && !b.slo.any())
      return invalid_argument("--sweep needs --slo, for example --slo ttft=500ms,itl=50ms");
    if (!b.sweep.empty() && b.rate > 0)
      return invalid_argument("--sweep finds the rate itself: leave out --rate, or begin at --sweep-low");
    if (b.batch > 1 && b.target.protocol != "ppl")
      return invalid_argument(cat("batch is ", b.batch, ", but ", b.target.protocol,
                                  " carries one request a call: it needs --protocol ppl"));
    if (b.sweep_low > b.sweep_high)
      return invalid_argument(cat("sweep_low is ", b.sweep_low, ", above sweep_high, which is ", b.sweep_high));
    b.closed = says("concurrency");
    KVASIR_TRY(check_use());
    b.duration = std::chrono::duration<double>(duration).count();
    b.workload.seed = b.seed;
    b.keep_text = !answers.empty();
    const bool http = b.target.protocol.starts_with("openai");
    b.target.address = words.empty() ? (http ? "127.0.0.1:8000" : "127.0.0.1:50051") : words[0];
    if (!http && (b.target.address.find(':') == std::string::npos || b.target.address.starts_with("http://") ||
                  b.target.address.starts_with("https://")))
      return invalid_argument(cat("target is ", b.target.address, "; over gRPC it must be HOST:PORT"));
    return {};
  }
};

bool write_file(const std::string& path, const std::string& text) {
  if (path.empty()) return true;
  if (path == "-") return std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  std::ofstream out(path, std::ios::binary);
  out << text;
  out.close();
  if (out) return true;
  std::fprintf(stderr, "kvasir bench: %s cannot be written\n", path.c_str());
  return false;
}

// Known before the load, which may take hours.
Status check_writable(const std::string& path) {
  if (path.empty() || path == "-" || access(path.c_str(), W_OK) == 0) return {};
  const auto folder = std::filesystem::path(path).parent_path();
  if (errno == ENOENT && access(folder.empty() ? "." : folder.c_str(), W_OK) == 0) return {};
  return invalid_argument(
      cat(path, " cannot be written: ", std::strerror(errno), "; name a file in a folder that is there"));
}

int compare_files(const std::vector<std::string>& files) {
  if (files.size() != 2) return complain(cat("--compare takes two reports, not ", files.size()), kUsage);
  std::string text[2];
  for (int i = 0; i < 2; ++i) {
    std::ifstream in(files[i]);
    if (!in) return complain(cat("the report ", files[i], " cannot be opened"), kFailed);
    text[i].assign(std::istreambuf_iterator<char>(in), {});
  }
  auto table = client::compare(text[0], text[1]);
  if (!table.ok()) return complain(table.status().message(), kFailed);
  std::printf("A = %s\nB = %s\n%s", files[0].c_str(), files[1].c_str(), table->c_str());
  return kOk;
}

void show(const std::string& what, const client::Progress& p) {
  std::fprintf(stderr, "\r  %s: %.0f s, %d under way, %d answered, %d failed, %.0f tokens a second \033[K",
               what.c_str(), p.seconds, p.started - p.finished - p.failed, p.finished, p.failed,
               p.seconds > 0 ? static_cast<double>(p.tokens) / p.seconds : 0);
}

std::string now_text() {
  char date[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%d %H:%M:%S", std::localtime(&now));
  return date;
}

std::string command_text(int argc, char** argv) {  // without the key
  std::string command = "kvasir";
  for (int i = 0; i < argc; ++i) {
    const bool key = i > 0 && std::string(argv[i - 1]) == "--api-key";
    command += " " + std::string(key || std::string(argv[i]).starts_with("--api-key=") ? "..." : argv[i]);
  }
  return command;
}

void print(const client::Report& r, const client::BenchOptions& b) {
  std::printf("%s", client::table_of(r.figures).c_str());
  if (b.slo.any()) {
    std::printf("  %-22s %.1f%% of requests, %.2f a second\n", "within the SLO", r.figures.within_slo * 100,
                r.figures.goodput);
  }
  std::printf("%s", client::server_table(r).c_str());
  for (const client::Point& p : r.points) {
    std::printf("  %s %-10.4g %s %8.1f tokens/s  ttft p99 %8.1f ms  itl p99 %7.1f ms  %.1f%% within\n", r.sweep.c_str(),
                p.load, p.within ? "good" : "bad ", p.figures.output_per_second, p.figures.ttft.p99 * 1e3,
                p.figures.itl.p99 * 1e3, p.figures.within_slo * 100);
  }
  if (!r.sweep.empty()) {
    if (r.best > 0) {
      std::printf("  highest %s within the SLO: %.4g\n", r.sweep.c_str(), r.best);
    } else {
      std::printf("  no %s was within the SLO, down to %.4g\n", r.sweep.c_str(),
                  r.points.empty() ? 0 : r.points.back().load);
    }
  }
  const client::Verification& v = r.verification;
  if (v.compared > 0) {
    std::printf("  %-22s %d compared, %d equal, %d near-ties, %d different, %d failed\n", "verified alone", v.compared,
                v.equal, v.near_ties, v.different, v.failed);
    for (const std::string& example : v.examples) std::printf("    %s\n", example.c_str());
  }
}

int bench(int argc, char** argv) {
  BenchConfig c;
  Options o("kvasir bench",
            "Puts a server under load and says how it did. Latency counts from when a request was due.");
  c.define(o);
  if (auto code = o.parse(argc, argv)) return *code;
  if (c.compare) return compare_files(c.words);
  if (Status status = c.settle(); !status.ok()) return complain(status.message(), kUsage);
  for (const std::string& path : {c.json, c.csv, c.html, c.answers})
    if (Status status = check_writable(path); !status.ok()) return complain(status.message(), kUsage);

  auto target = client::make_target(c.b.target);
  if (!target.ok()) return complain(target.status().message(), kFailed);
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
  const bool terminal = isatty(STDERR_FILENO);
  auto done = client::run_bench(**target, c.b, interrupted, terminal ? client::OnProgress(show) : client::OnProgress());
  if (terminal) std::fprintf(stderr, "\r\033[K");
  if (!done.ok()) return complain(done.status().message(), kFailed);

  client::Report& r = done->report;
  r.date = now_text();
  r.command = command_text(argc, argv);
  print(r, c.b);
  bool written = c.json.empty() || write_file(c.json, client::json_of(r));
  written &= c.csv.empty() || write_file(c.csv, client::csv_of(done->run));
  written &= c.html.empty() || write_file(c.html, client::html_of(r));
  written &= c.answers.empty() || write_file(c.answers, client::answers_of(done->workload, done->run));
  std::fflush(stdout);
  // Calls cut off by an interrupt may still be under way; they are not waited for.
  if (r.figures.partial) _exit(kFailed);
  const bool right = r.verification.different == 0 && r.verification.failed == 0;
  return written && right && r.figures.good > 0 ? kOk : kFailed;
}

}  // namespace

extern const Command bench_command;
const Command bench_command{"bench", "put a server under load and report how it did", bench};

}  // namespace kvasir::cli
