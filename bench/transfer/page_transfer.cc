// What a cache's pages cost from one process to another on this machine: copied into memory that both have mapped and
// out of it again, and sent over TCP on the loopback interface. page_transfer_bench [SECONDS] prints JSON.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "core/cat.h"
#include "core/check.h"

namespace kvasir {
namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kSlots = 4;         // pages on their way in shared memory
constexpr size_t kPool = 256 << 20;  // where pages come from and go to: more than a cache of the processor holds

double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

// Pages of a pool, one after another.
class Pages {
 public:
  explicit Pages(size_t page) : page_(page), bytes_(kPool / page * page, 1) {}
  char* next() {
    char* at = bytes_.data() + at_;
    at_ = (at_ + page_) % bytes_.size();
    return at;
  }

 private:
  const size_t page_;
  std::vector<char> bytes_;
  size_t at_ = 0;
};

struct Head {
  std::atomic<uint64_t> written{0}, read{0};
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

void wait_until(const std::function<bool()>& there) {
  for (int spins = 0; !there(); ++spins)
    if (spins > 1000) usleep(20);
}

// The child runs `receive`; what the parent's `send` took until the child had all of it.
template <class Send, class Receive>
double both(Send&& send, Receive&& receive) {
  const pid_t child = fork();
  KVASIR_CHECK(child >= 0, "fork failed");
  if (child == 0) {
    receive();
    _exit(0);
  }
  const auto began = Clock::now();
  send();
  int status = 0;
  KVASIR_CHECK(waitpid(child, &status, 0) == child && status == 0, "the receiver failed");
  return seconds_since(began);
}

double shared_memory(size_t page, size_t count) {
  const size_t bytes = sizeof(Head) + kSlots * page;
  void* map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  KVASIR_CHECK(map != MAP_FAILED, "mmap failed");
  Head& head = *new (map) Head;
  char* slots = static_cast<char*>(map) + sizeof(Head);
  Pages pages(page);
  const double took = both(
      [&] {
        for (size_t i = 0; i < count; ++i) {
          wait_until([&] { return i - head.read.load(std::memory_order_acquire) < kSlots; });
          std::memcpy(slots + i % kSlots * page, pages.next(), page);
          head.written.store(i + 1, std::memory_order_release);
        }
      },
      [&] {
        for (size_t i = 0; i < count; ++i) {
          wait_until([&] { return head.written.load(std::memory_order_acquire) > i; });
          std::memcpy(pages.next(), slots + i % kSlots * page, page);
          head.read.store(i + 1, std::memory_order_release);
        }
      });
  munmap(map, bytes);
  return took;
}

double loopback(size_t page, size_t count) {
  const int door = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof at;
  KVASIR_CHECK(bind(door, reinterpret_cast<sockaddr*>(&at), size) == 0 && listen(door, 1) == 0 &&
                   getsockname(door, reinterpret_cast<sockaddr*>(&at), &size) == 0,
               "no port on the loopback interface");
  Pages pages(page);
  const double took = both(
      [&] {
        const int to = accept(door, nullptr, nullptr);
        int yes = 1;
        setsockopt(to, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        for (size_t i = 0; i < count; ++i) {
          const char* bytes = pages.next();
          for (size_t sent = 0; sent < page;) {
            const ssize_t n = send(to, bytes + sent, page - sent, 0);
            KVASIR_CHECK(n > 0, "send failed");
            sent += size_t(n);
          }
        }
        close(to);
      },
      [&] {
        const int from = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(from, reinterpret_cast<sockaddr*>(&at), size) != 0) _exit(1);
        for (size_t i = 0; i < count; ++i) {
          char* bytes = pages.next();
          for (size_t got = 0; got < page;) {
            const ssize_t n = recv(from, bytes + got, page - got, 0);
            if (n <= 0) _exit(1);
            got += size_t(n);
          }
        }
      });
  close(door);
  return took;
}

// Bytes a second, the best of three that take about so long.
double rate(const std::function<double(size_t page, size_t count)>& way, size_t page, double seconds) {
  size_t count = std::max<size_t>(8, (64 << 20) / page);
  double took = way(page, count);
  count = std::max<size_t>(8, size_t(double(count) * seconds / std::max(took, 1e-4)));
  double best = 0;
  for (int i = 0; i < 3; ++i) best = std::max(best, double(page) * double(count) / way(page, count));
  return best;
}

void run(double seconds) {
  std::string rows;
  // A page of 16 tokens: SmolLM2-135M, Llama-3.1-8B, Llama-3.3-70B in 16 bits; and 4 KiB, to see what a message costs.
  for (size_t page : {size_t(4) << 10, size_t(360) << 10, size_t(2) << 20, size_t(5) << 20}) {
    rows += cat(rows.empty() ? "" : ",", "\n    {\"page_bytes\": ", page,
                ", \"shared_memory_gb_s\": ", rate(shared_memory, page, seconds) * 1e-9,
                ", \"loopback_tcp_gb_s\": ", rate(loopback, page, seconds) * 1e-9, "}");
  }
  std::printf("{\n  \"command\": \"page_transfer_bench %g\",\n  \"processors\": %ld,\n  \"pages\": [%s\n  ]\n}\n",
              seconds, sysconf(_SC_NPROCESSORS_ONLN), rows.c_str());
}

}  // namespace
}  // namespace kvasir

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 1;
  if (argc > 2 || !(seconds > 0 && seconds <= 60)) {
    std::fprintf(stderr, "usage: page_transfer_bench [SECONDS]  (of each measurement, up to 60; 1 unless said)\n");
    return 2;
  }
  kvasir::run(seconds);
}
