// kvasir serve: ports first, then the model; SIGTERM (or SIGINT, or SIGHUP) drains, a second one cuts short.
#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <latch>
#include <semaphore>
#include <system_error>
#include <thread>
#include <vector>

#include "cli/command.h"
#include "cli/serve_config.h"
#include "core/cat.h"
#include "server/server.h"
#include "server/thoughts.h"

namespace kvasir::cli {
namespace {

constexpr int kDone = SIGUSR1;  // from our own threads: look again

// The signals that end a server, taken by one thread: no handler runs in the middle of anything. A terminal that closes
// is one of them, unless whoever started this said that it shall not be, as nohup does.
sigset_t ending_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (int s : {SIGTERM, SIGINT, kDone}) sigaddset(&set, s);
  struct sigaction hangup {};
  if (sigaction(SIGHUP, nullptr, &hangup) == 0 && hangup.sa_handler != SIG_IGN) sigaddset(&set, SIGHUP);
  return set;
}

// The signal that came; or 0 when one of our own threads says, by kDone, that `done` is true.
int wait_signal(const sigset_t& set, const std::atomic<bool>& done) {
  for (int signal = 0; !done;)
    if (sigwait(&set, &signal) == 0 && signal != kDone) return signal;
  return 0;
}

// A second one. Ctrl-C reaches a server twice when whoever started it passes signals on: what follows the
// first at once is the same one.
int wait_second_signal(const sigset_t& set, const std::atomic<bool>& done) {
  auto first = std::chrono::steady_clock::now();
  for (;;) {
    int signal = wait_signal(set, done);
    if (signal == 0 || std::chrono::steady_clock::now() - first > std::chrono::milliseconds(300)) return signal;
  }
}

// What another thread is to do later. The thread is there from the start: when it is wanted the machine may have none
// left to give. What was never begun is not done.
class Errand {
 public:
  explicit Errand(std::function<void()> work) : work_(std::move(work)), thread_([this] { run(); }) {}
  ~Errand() {
    if (thread_.joinable()) join();
  }
  void begin() {
    begun_ = true;
    wake_.release();
  }
  void join() {
    wake_.release();
    thread_.join();
  }

 private:
  void run() {
    wake_.acquire();
    if (begun_) work_();
  }
  std::function<void()> work_;
  std::counting_semaphore<2> wake_{0};
  std::atomic<bool> begun_{false};
  std::thread thread_;
};

// gRPC ends the process where it cannot have a thread, so whether there are as many as it takes, and some, is seen
// first.
constexpr int kThreadsToSpare = 32;

bool threads_to_spare() {
  std::latch seen(1);
  std::vector<std::jthread> held;
  bool enough = true;
  try {
    while (held.size() < kThreadsToSpare) held.emplace_back([&] { seen.wait(); });
  } catch (const std::system_error&) {
    enough = false;
  }
  seen.count_down();
  return enough;
}

void print_ready(const ServeConfig& config, const engine::Engine& engine, const server::Server& server,
                 std::chrono::steady_clock::time_point began) {
  const model::ModelInfo& info = engine.info();
  double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  log_info("ready", {{"model", info.name},
                     {"architecture", info.architecture},
                     {"quantization", info.quantization},
                     {"seconds", took},
                     {"grpc_port", server.grpc_port()},
                     {"http_port", server.http_port()},
                     {"host", config.server.host}});
}

// What the server's options repeat of the engine's.
void share_options(ServeConfig& config) {
  const auto& engine = config.model.engine;
  config.server.page_size = engine.page_size;
  config.server.max_tokens_per_step = engine.max_tokens_per_step;
  config.server.kv_events = {config.kv_events.address, config.kv_events.replay, config.kv_events.topic,
                             uint32_t(engine.cache_event_ring), uint32_t(server::KvPublisher::kWaitingMessages)};
  config.server.max_running = engine.max_running;
  config.server.model_path = config.model.model.model;
}

int fail(const std::string& why) {
  std::fprintf(stderr, "kvasir serve: %s\n", why.c_str());
  return kFailed;
}

// What was asked for and is without effect here.
void warn_of_no_effect(const server::ServerOptions& options, const engine::Engine& engine) {
  if (options.thinking_token_budget >= 0 && !server::can_limit_thoughts(server::reasoning_format(options, engine)))
    log_warn("thinking_token_budget is without effect: this model's chat template has no thoughts that are counted",
             {{"thinking_token_budget", options.thinking_token_budget}});
  std::error_code none;
  if (options.model_source.starts_with('/') && !std::filesystem::is_directory(options.model_source, none))
    log_warn("model_source is no folder on this machine; gateways must have it on theirs",
             {{"model_source", options.model_source}});
}

int serve_with(ServeConfig& config) {
  auto began = std::chrono::steady_clock::now();
  signal(SIGPIPE, SIG_IGN);
  sigset_t signals = ending_signals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // before any thread: all inherit it
  pthread_t here = pthread_self();

  share_options(config);
  Status ready = config.ppl.check(config.model.model.model);
  if (ready.ok()) ready = config.find_sampling();
  if (!ready.ok()) return fail(ready.message());
  if (!threads_to_spare())
    return fail(cat("fewer than ", kThreadsToSpare,
                    " threads can be started; raise the limit of processes (ulimit -u, pids.max) or of memory"));
  std::atomic<bool> ending{false}, failed{false}, over{false}, drained{false};  // over: failed, or asked to drain
  config.server.on_drain = [&, here] {
    over = true;
    pthread_kill(here, kDone);
  };
  std::unique_ptr<engine::Engine> engine;
  server::Server* serving = nullptr;
  Errand loading([&] {
    Status ready = engine->wait_ready();
    if (ready.ok()) {
      warn_of_no_effect(config.server, *engine);
      return print_ready(config, *engine, *serving, began);
    }
    if (ending) return;  // a signal came first
    fail(ready.message());
    failed = over = true;
    pthread_kill(here, kDone);
  });
  Errand draining([&] {
    serving->drain(config.drain);
    drained = true;
    pthread_kill(here, kDone);
  });
  engine = engine::Engine::start(config.model.runner_options(), config.model.engine_options());
  std::unique_ptr<server::KvPublisher> published;
  if (!config.kv_events.address.empty()) {
    auto publisher = server::KvPublisher::start(config.kv_events, *engine, config.model.engine.page_size);
    if (!publisher.ok()) return fail(publisher.status().message());
    published = std::move(*publisher);
  }
  auto started = server::Server::start(config.server, *engine);
  if (!started.ok()) return fail(started.status().message());
  serving = started->get();
  loading.begin();

  const int signal = wait_signal(signals, over);
  if (!failed) {
    ending = true;
    const char* why = signal == 0        ? "POST /drain"
                      : signal == SIGINT ? "SIGINT"
                      : signal == SIGHUP ? "SIGHUP"
                                         : "SIGTERM";
    log_info("draining", {{"signal", why}, {"drain_seconds", std::chrono::duration<double>(config.drain).count()}});
    draining.begin();
    // Who was asked to drain has had no signal yet: an orchestrator sends its first one while that goes on.
    if ((signal != 0 || wait_signal(signals, drained) != 0) && wait_second_signal(signals, drained) != 0) {
      log_warn("cut short by a second signal");
      serving->stop();
    }
    draining.join();
  }
  loading.join();
  started->reset();
  engine.reset();
  log_info("stopped");
  return failed ? kFailed : kOk;
}

int serve(int argc, char** argv) {
  ServeConfig config;
  Options options("kvasir serve", "Serves one model to many clients, over gRPC and HTTP.");
  config.define(options);
  std::vector<std::string> warnings;
  if (auto code = options.parse(argc, argv, &warnings)) return *code;
  log_start(config.log);
  for (const std::string& warning : warnings) log_warn("options", {{"warning", warning}});
  int code = kFailed;
  if (Status here = config.model.fetch(); here.ok())  // signals still end a download at once; it is resumed later
    code = serve_with(config);
  else
    fail(here.message());
  log_stop();
  return code;
}

}  // namespace

extern const Command serve_command;
const Command serve_command{"serve", "serve a model over gRPC and HTTP", serve};

}  // namespace kvasir::cli
