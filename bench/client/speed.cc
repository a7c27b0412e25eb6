// What the load generator itself costs: a server in another process that answers at once, and one that
// keeps an exact pace. Prints tokens a second for each core of the client, what the client adds to a gap, and how
// well it tells gaps that are known.
#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <sstream>
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
      m.mutable_delta()->set_text(std::to_string(std::chrono::steady_clock::now().time_since_epoch().count()) + " ");
      out->Write(m);
    }
    m.mutable_finished()->mutable_usage()->set_completion_tokens(r->max_tokens());
    out->Write(m);
    return grpc::Status::OK;
  }

 private:
  double gap_;
};

constexpr int kTokens = 500;  // of each answer of the servers that answer at once

// Answers every request on a connection with so many events, each in a chunk and a write of its own.
void answer_http(int connection) {
  const std::string event =
      "data: {\"id\":\"c\",\"object\":\"text_completion\",\"created\":1,\"model\":\"m\",\"choices\":["
      "{\"index\":0,\"text\":\" word\",\"logprobs\":null,\"finish_reason\":null}]}\n\n";
  char size[16];
  std::snprintf(size, sizeof size, "%zx\r\n", event.size());
  const std::string chunk = size + event + "\r\n", end = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
  const auto put = [&](const std::string& bytes) {
    return send(connection, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
  };
  char in[4096];
  std::string request;
  for (ssize_t n; (n = read(connection, in, sizeof in)) > 0;) {
    request.append(in, static_cast<size_t>(n));
    if (request.find("\"temperature\":0.0}") == std::string::npos) continue;  // what our bodies end with
    request.clear();
    bool there = put("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
    for (int i = 0; i < kTokens && there; ++i) there = put(chunk);
    if (!there || !put(end)) break;
  }
  close(connection);
}

int listen_http(int& port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in a{};
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof a;
  if (bind(fd, reinterpret_cast<sockaddr*>(&a), size) != 0 || listen(fd, 64) != 0) std::abort();
  getsockname(fd, reinterpret_cast<sockaddr*>(&a), &size);
  port = ntohs(a.sin_port);
  return fd;
}

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

Child serve_http() {
  int port = 0;
  const int fd = listen_http(port);
  const pid_t pid = fork();
  if (pid == 0) {
    for (int c; (c = accept(fd, nullptr, nullptr)) >= 0;) std::thread(answer_http, c).detach();
    _exit(0);
  }
  close(fd);
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
  void on_tokens(const client::AnswerPiece& piece) override {
    const int64_t sent = std::strtoll(std::string(piece.text).c_str(), nullptr, 10);
    const int64_t now = std::chrono::steady_clock::now().time_since_epoch().count();
    delays.push_back(static_cast<double>(now - sent) * 1e-9);
  }
  void on_done(const Status&, const client::Usage&) override { done = true; }
  std::vector<double> delays;
  std::atomic<bool> done{false};
};

struct Outcome {
  double tokens_a_core = 0, http_tokens_a_core = 0;  // of a server that answers at once
  client::Spread added;                              // seconds from the server's write to the client's clock
  double paced_tokens_a_second = 0;
  double worst_error = 0, worst_p99_error = 0;  // of the figures against known delays, as a share
};

double at_once(const std::string& protocol, int port) {
  client::TargetOptions options;
  options.protocol = protocol;
  options.address = "127.0.0.1:" + std::to_string(port);
  auto target = *client::make_target(options);
  client::Workload w;
  w.prompts = {{"x", kTokens}};
  client::LoadOptions o;
  o.requests = 400;
  o.concurrency = 16;
  const std::atomic<bool> never{false};
  const double cpu = cpu_seconds();
  const client::LoadRun run = run_load(*target, w, o, never, {});
  const double used = cpu_seconds() - cpu;
  const client::Figures f = figures_of(run, {});
  const double a_core = static_cast<double>(f.output_tokens) / used;
  std::printf("at once, %s: %lld tokens, %d failed, in %.2f s; %.0f tokens a second of wall, %.0f a core (bar 20000)\n",
              protocol.c_str(), static_cast<long long>(f.output_tokens), f.failed, f.seconds, f.output_per_second,
              a_core);
  return a_core;
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

// The gaps as the server made them, from the clock in each token's text: a busy machine wakes sleepers late.
client::Spread servers_gaps(const client::LoadRun& run) {
  std::vector<double> gaps;
  for (const client::Record& r : run.records) {
    std::istringstream clocks(r.text);
    int64_t before = 0;
    for (int64_t now; clocks >> now; before = now) {
      if (before) gaps.push_back(static_cast<double>(now - before) * 1e-9);
    }
  }
  return client::spread_of(std::move(gaps));
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
    o.keep_text = true;
    const client::LoadRun run = run_load(*target, w, o, never, {});
    const client::Figures f = figures_of(run, {});
    const client::Spread made = servers_gaps(run);
    for (const double ratio : {f.itl.p50 / made.p50, f.itl.mean / made.mean, f.tpot.mean / made.mean})
      out.worst_error = std::max(out.worst_error, std::abs(ratio - 1));
    out.worst_p99_error = std::max(out.worst_p99_error, std::abs(f.itl.p99 / made.p99 - 1));
    std::printf("gaps of %.0f ms: p50 %.3f, mean %.3f, p99 %.3f ms; the server made them %.3f, %.3f, %.3f (bar 2%%)\n",
                gap * 1e3, f.itl.p50 * 1e3, f.itl.mean * 1e3, f.itl.p99 * 1e3, made.p50 * 1e3, made.mean * 1e3,
                made.p99 * 1e3);
  }
}

}  // namespace

// The last line is the outcome as JSON, for bench/all.
int main() {
  std::vector<Child> children;
  for (const double gap : {0.0, 0.0032, 0.02, 0.04, 0.08}) children.push_back(serve(gap));
  children.push_back(serve_http());
  Outcome out;
  out.tokens_a_core = at_once("kvasir", children[0].port);
  out.http_tokens_a_core = at_once("openai", children.back().port);
  paced(out, children[1].port);
  known(out, {{0.02, children[2].port}, {0.04, children[3].port}, {0.08, children[4].port}});
  for (const Child& child : children) {
    kill(child.pid, SIGKILL);
    waitpid(child.pid, nullptr, 0);
  }
  std::printf(
      "{\"tokens_a_second_a_core\": %.0f, \"http_tokens_a_second_a_core\": %.0f, \"paced_tokens_a_second\": %.0f, "
      "\"added_p50_ms\": %.4f, \"added_p99_ms\": "
      "%.4f, "
      "\"worst_error_of_known_delays\": %.5f, \"worst_error_of_their_p99\": %.5f}\n",
      out.tokens_a_core, out.http_tokens_a_core, out.paced_tokens_a_second, out.added.p50 * 1e3, out.added.p99 * 1e3,
      out.worst_error, out.worst_p99_error);
}
