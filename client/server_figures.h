// What a server says of itself while it is under load, taken beside the client's own figures.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "client/http_client.h"

namespace kvasir::client {

using ServerFigures = std::map<std::string, double>;  // empty: it said nothing

// A Prometheus page: a name's values added up over its labels; histograms and quantiles are left out.
ServerFigures figures_of_metrics(const std::string& page);
// Fetches one, waiting at most this long.
ServerFigures fetch_metrics(HttpClient& http, const std::string& path, std::chrono::milliseconds limit);

struct ServerSample {
  double at = 0;  // seconds from the start
  ServerFigures figures;
};

// Asks once a second, from a thread of its own, until it is stopped.
class ServerWatch {
 public:
  explicit ServerWatch(std::function<ServerFigures()> ask);
  ~ServerWatch() { stop(); }
  std::vector<ServerSample> stop();

 private:
  void watch(const std::function<ServerFigures()>& ask);
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  std::vector<ServerSample> samples_;
  std::thread thread_;
};

}  // namespace kvasir::client
