// A real `kvasir serve` in a process of its own, on free ports.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace kvasir::e2e {

inline std::string default_model() {
  if (const char* named = std::getenv("KVASIR_TEST_MODEL")) return named;
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  return (cache ? std::string(cache) : std::string(home ? home : "") + "/.cache") +
         "/kvasir/models/SmolLM2-135M-Instruct.Q4_1.gguf";
}
inline bool readable(const std::string& path) { return access(path.c_str(), R_OK) == 0; }

class ServerProcess {
 public:
  // On free ports, where `ports` does not say otherwise.
  explicit ServerProcess(std::vector<std::string> arguments,
                         std::vector<std::string> ports = {"--grpc-port", "0", "--http-port", "0"}) {
    int log[2];
    if (pipe2(log, O_CLOEXEC) != 0) std::abort();
    arguments.insert(arguments.begin(), ports.begin(), ports.end());
    arguments.insert(arguments.begin(), {KVASIR_EXE, "serve"});
    std::vector<char*> argv;
    for (auto& a : arguments) argv.push_back(a.data());
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(log[1], STDERR_FILENO);
      execv(argv[0], argv.data());
      _exit(127);
    }
    close(log[1]);
    reader_ = std::thread([this, fd = log[0]] { read_log(fd); });
  }
  ~ServerProcess() {
    if (pid_ > 0) kill(pid_, SIGKILL);
    wait();
  }

  // Waits until the log has said this; false if the process ended or time ran out.
  bool said(const std::string& what, std::chrono::milliseconds limit = std::chrono::seconds(60)) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, limit, [&] { return over_ || log_.find(what) != std::string::npos; }) &&
           log_.find(what) != std::string::npos;
  }
  bool ready() { return said("\"message\":\"ready\""); }
  int grpc_port() { return number("\"grpc_port\":"); }
  int http_port() { return number("\"http_port\":"); }
  std::string address() { return "127.0.0.1:" + std::to_string(grpc_port()); }
  std::string log() {
    std::lock_guard lock(mutex_);
    return log_;
  }
  pid_t pid() const { return pid_; }
  void signal(int s) const { kill(pid_, s); }
  // The exit code, or minus the signal that ended it; its log is complete then.
  int wait() {
    if (pid_ <= 0) return code_;
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    reader_.join();
    return code_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

  // Processor seconds of the whole process, in ticks of 10 ms.
  double cpu_seconds() const { return stat_seconds("/proc/" + std::to_string(pid_) + "/stat"); }
  // The same of the threads that are there now, to the nanosecond: what an idle server is measured by.
  double fine_cpu_seconds() const {
    double sum = 0;
    for (const auto& task : std::filesystem::directory_iterator("/proc/" + std::to_string(pid_) + "/task")) {
      double nanoseconds = 0;
      std::ifstream(task.path() / "schedstat") >> nanoseconds;
      sum += nanoseconds * 1e-9;
    }
    return sum;
  }
  // The share of a core it takes over so long.
  double cpu_share(std::chrono::milliseconds time) const {
    double before = fine_cpu_seconds();
    auto began = std::chrono::steady_clock::now();
    std::this_thread::sleep_for(time);
    double passed = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    return (fine_cpu_seconds() - before) / passed;
  }

 private:
  static double stat_seconds(const std::string& path) {
    std::ifstream file(path);
    std::string text((std::istreambuf_iterator<char>(file)), {});
    std::istringstream rest(text.substr(text.rfind(')') + 2));
    std::string skip;
    for (int i = 0; i < 11; ++i) rest >> skip;
    double user = 0, system = 0;
    rest >> user >> system;
    return (user + system) / double(sysconf(_SC_CLK_TCK));
  }
  int number(const std::string& after) {
    if (!said(after, std::chrono::seconds(10))) return -1;
    std::lock_guard lock(mutex_);
    return std::atoi(log_.c_str() + log_.find(after) + after.size());
  }
  void read_log(int fd) {
    char buffer[4096];
    for (ssize_t n; (n = read(fd, buffer, sizeof buffer)) > 0;) {
      std::lock_guard lock(mutex_);
      log_.append(buffer, size_t(n));
      changed_.notify_all();
    }
    close(fd);
    std::lock_guard lock(mutex_);
    over_ = true;
    changed_.notify_all();
  }

  pid_t pid_ = -1;
  int code_ = 0;
  std::thread reader_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string log_;
  bool over_ = false;
};

}  // namespace kvasir::e2e
