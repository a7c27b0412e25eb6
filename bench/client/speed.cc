// What the load generator itself costs: a server in another process that answers at once, and one that
// keeps an exact pace. Prints tokens a second for each core of the client, what the client adds to a gap, and how
// well it tells gaps that are known.
#include <grpcpp/grpcpp.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <thread>

#include "client/figures.h"
#include "kvasir.grpc.pb.h"

namespace {

using namespace kvasir;

// Writes its clock into each token's text, so that the client's delay can be told from the server's.
class Server final : public v1::Inference::Service {
 public:
  explicit Server(double gap) : gap_(gap) {}
  grpc::Status Generate(grpc::ServerContext* context, const v1::GenerateRequest* r,
                        grpc::ServerWriter<v1::GenerateResponse>* out) override {
    v1::GenerateResponse m;
    auto next = std::chrono::steady_clock::now();
    for (uint32_t i = 0; i < r->max_tokens() && !context->IsCancelled(); ++i) {
      if (gap_ > 0) std::this_thread::sleep_until(next);
      next += std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(gap_));
      m.mutable_delta()->clear_tokens();
      m.mutable_delta()->add_tokens()->set_id(i);
      m.mutable_delta()->set_text(std::to_string(std::chrono::steady_clock::now().time_since_epoch().count()));
      out->Write(m);
    }
    m.mutable_finished()->mutable_usage()->set_completion_tokens(r->max_tokens());
    out->Write(m);
    return grpc::Status::OK;
  }

 private:
  double gap_;
};

struct Child {
  pid_t pid;
  int port;
};

// The child must be forked before this process uses gRPC.
Child serve(double gap) {
  int pipe_ends[2];
  if (pipe(pipe_ends) != 0) std::abort();
  const pid_t pid = fork();
  if (pid == 0) {
    Server service(gap);
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service);
    auto server = builder.BuildAndStart();
    if (write(pipe_ends[1], &port, sizeof port) != sizeof port) _exit(1);
    server->Wait();
    _exit(0);
  }
  int port = 0;
  if (read(pipe_ends[0], &port, sizeof port) != sizeof port) std::abort();
  return {pid, port};
}

double cpu_seconds() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

// How long each token took from the server's clock to the client's (one machine, one clock).
class Delays final : public client::Sink {
 public:
  void on_tokens(const client::Piece& piece) override {
    const int64_t sent = std::strtoll(std::string(piece.text).c_str(), nullptr, 10);
    const int64_t now = std::chrono::steady_clock::now().time_since_epoch().count();
    delays.push_back(static_cast<double>(now - sent) * 1e-9);
  }
  void on_done(const Status&, const client::Usage&) override { done = true; }
  std::vector<double> delays;
  std::atomic<bool> done{false};
};

struct Outcome {
  double tokens_a_core = 0;  // of a server that answers at once
  client::Spread added;      // seconds from the server's write to the client's clock
  double paced_tokens_a_second = 0;
  double worst_error = 0;  // of the figures against known delays, as a share
};

void at_once(Outcome& out, int port) {
  auto target = *client::make_target({"kvasir", "127.0.0.1:" + std::to_string(port)});
  client::Workload w;
  w.prompts = {{"x", 500}};
  client::LoadOptions o;
  o.requests = 400;
  o.concurrency = 16;
  const std::atomic<bool> never{false};
  const double cpu = cpu_seconds();
  const client::Run run = run_load(*target, w, o, never, {});
  const double used = cpu_seconds() - cpu;
  const client::Figures f = figures_of(run, {});
  out.tokens_a_core = static_cast<double>(f.output_tokens) / used;
  std::printf("at once: %lld tokens in %.2f s; %.0f tokens a second of wall, %.0f a core of the client (bar 20000)\n",
              static_cast<long long>(f.output_tokens), f.seconds, f.output_per_second, out.tokens_a_core);
}

void paced(Outcome& out, int port) {
  auto target = *client::make_target({"kvasir", "127.0.0.1:" + std::to_string(port)});
  std::vector<std::shared_ptr<Delays>> sinks;
  const auto start = std::chrono::steady_clock::now();
  client::Ask ask;
  ask.prompt = "x";
  ask.max_tokens = 1500;
  for (int i = 0; i < 32; ++i) {
    sinks.push_back(std::make_shared<Delays>());
    target->start(ask, sinks.back());
  }
  std::vector<double> all;
  for (const auto& s : sinks) {
    while (!s->done) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    all.insert(all.end(), s->delays.begin() + 100, s->delays.end());
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  out.paced_tokens_a_second = 32 * 1500 / seconds;
  out.added = client::spread_of(std::move(all));
  std::printf("paced: %.0f tokens a second; from the server's write to our clock p50 %.3f ms, p99 %.3f ms (bar 1 ms)\n",
              out.paced_tokens_a_second, out.added.p50 * 1e3, out.added.p99 * 1e3);
}

// Gaps of 20, 40 and 80 ms: what the client says of them.
void known(Outcome& out, const std::vector<std::pair<double, int>>& servers) {
  const std::atomic<bool> never{false};
  for (const auto& [gap, port] : servers) {
    auto target = *client::make_target({"kvasir", "127.0.0.1:" + std::to_string(port)});
    client::Workload w;
    w.prompts = {{"x", 40}};
    client::LoadOptions o;
    o.requests = 8;
    o.concurrency = 4;
    const client::Figures f = figures_of(run_load(*target, w, o, never, {}), {});
    const double median = std::abs(f.itl.p50 / gap - 1), mean = std::abs(f.itl.mean / gap - 1),
                 tpot = std::abs(f.tpot.mean / gap - 1);
    out.worst_error = std::max({out.worst_error, median, mean, tpot});
    std::printf("gaps of %.0f ms: between tokens p50 %.3f ms, mean %.3f ms, per token %.3f ms (bar 2%%)\n", gap * 1e3,
                f.itl.p50 * 1e3, f.itl.mean * 1e3, f.tpot.mean * 1e3);
  }
}

}  // namespace

// The last line is the outcome as JSON, for bench/all.
int main() {
  std::vector<Child> children;
  for (const double gap : {0.0, 0.0032, 0.02, 0.04, 0.08}) children.push_back(serve(gap));
  Outcome out;
  at_once(out, children[0].port);
  paced(out, children[1].port);
  known(out, {{0.02, children[2].port}, {0.04, children[3].port}, {0.08, children[4].port}});
  for (const Child& child : children) {
    kill(child.pid, SIGKILL);
    waitpid(child.pid, nullptr, 0);
  }
  std::printf(
      "{\"tokens_a_second_a_core\": %.0f, \"paced_tokens_a_second\": %.0f, \"added_p50_ms\": %.4f, \"added_p99_ms\": "
      "%.4f, "
      "\"worst_error_of_known_delays\": %.5f}\n",
      out.tokens_a_core, out.paced_tokens_a_second, out.added.p50 * 1e3, out.added.p99 * 1e3, out.worst_error);
}
