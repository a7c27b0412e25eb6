#include "client/server_figures.h"

#include <chrono>
#include <cstdlib>
#include <future>
#include <memory>

namespace kvasir::client {
namespace {

constexpr size_t kMostNames = 300, kMostPage = 4 << 20;

}  // namespace

ServerFigures figures_of_metrics(const std::string& page) {
  ServerFigures out;
  for (size_t at = 0; at < page.size();) {
    const size_t end = std::min(page.find('\n', at), page.size());
    const std::string line = page.substr(at, end - at);
    at = end + 1;
    if (line.empty() || line[0] == '#') continue;
    const size_t name_end = line.find_first_of("{ ");
    if (name_end == std::string::npos) continue;
    const std::string name = line.substr(0, name_end);
    size_t value_at = name_end;
    if (line[name_end] == '{') {
      const size_t close = line.rfind('}');
      if (close == std::string::npos) continue;
      const std::string labels = line.substr(name_end, close - name_end);
      if (labels.find("le=\"") != std::string::npos || labels.find("quantile=\"") != std::string::npos) continue;
      value_at = close + 1;
    }
    char* stop = nullptr;
    const double value = std::strtod(line.c_str() + value_at, &stop);
    if (stop == line.c_str() + value_at || (out.size() >= kMostNames && !out.contains(name))) continue;
    out[name] += value;
  }
  return out;
}

ServerFigures fetch_metrics(HttpClient& http, const std::string& path, std::chrono::milliseconds limit) {
  struct Page {
    std::string text;
    std::promise<bool> ended;
  };
  auto page = std::make_shared<Page>();
  auto ended = page->ended.get_future();
  http.get(
      path,
      [page](const HttpStream&, std::string_view bytes) {
        if (page->text.size() < kMostPage) page->text += bytes;
      },
      [page](const HttpStream& answer, const Status& status) {
        page->ended.set_value(status.ok() && answer.status() == 200);
      });
  if (ended.wait_for(limit) != std::future_status::ready || !ended.get()) return {};
  return figures_of_metrics(page->text);
}

ServerWatch::ServerWatch(std::function<ServerFigures()> ask) : thread_([this, ask = std::move(ask)] { watch(ask); }) {}

void ServerWatch::watch(const std::function<ServerFigures()>& ask) {
  const auto start = std::chrono::steady_clock::now();
  auto next = start;
  for (;;) {
    ServerSample sample{std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), ask()};
    std::unique_lock lock(mutex_);
    if (!sample.figures.empty()) samples_.push_back(std::move(sample));
    next = std::max(next + std::chrono::seconds(1), std::chrono::steady_clock::now());
    if (changed_.wait_until(lock, next, [&] { return over_; })) return;
  }
}

std::vector<ServerSample> ServerWatch::stop() {
  {
    std::lock_guard lock(mutex_);
    over_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  return std::move(samples_);
}

}  // namespace kvasir::client
