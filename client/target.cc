#include "client/target.h"

#include "client/grpc_target.h"
#include "client/openai_target.h"

namespace kvasir::client {

namespace {

Result<std::unique_ptr<Target>> make_one(const TargetOptions& options) {
  if (options.protocol == "kvasir") return make_kvasir_target(options);
  if (options.protocol == "ppl") return make_ppl_target(options);
  if (options.protocol == "vllm") return make_vllm_target(options);
  if (options.protocol == "openai") return make_openai_target(options, false);
  if (options.protocol == "openai-chat") return make_openai_target(options, true);
  return invalid_argument("protocol is " + options.protocol + "; it must be kvasir, ppl, vllm, openai or openai-chat");
}

// A target whose own figures stand on a page elsewhere.
class WithMetrics final : public Target {
 public:
  WithMetrics(std::unique_ptr<Target> target, std::unique_ptr<HttpClient> http, std::string path)
      : target_(std::move(target)), http_(std::move(http)), path_(std::move(path)) {}
  void start(const Ask& ask, std::shared_ptr<Sink> sink) override { target_->start(ask, std::move(sink)); }
  void start_together(std::vector<std::pair<Ask, std::shared_ptr<Sink>>> asks) override {
    target_->start_together(std::move(asks));
  }
  ServerFigures server_figures() override { return fetch_metrics(*http_, path_, std::chrono::seconds(2)); }

 private:
  const std::unique_ptr<Target> target_;
  const std::unique_ptr<HttpClient> http_;
  const std::string path_;
};

}  // namespace

double top_gap_of(const std::vector<double>& logprobs) {
  if (logprobs.size() < 2) return -1;
  double first = logprobs[0], second = -INFINITY;
  for (size_t i = 1; i < logprobs.size(); ++i) {
    second = std::max(second, std::min(first, logprobs[i]));
    first = std::max(first, logprobs[i]);
  }
  return first - second;
}

Result<std::unique_ptr<Target>> make_target(const TargetOptions& options) {
  KVASIR_ASSIGN(auto target, make_one(options));
  if (options.metrics.empty()) return target;
  std::string address = options.metrics, path = "/metrics";
  const size_t scheme = address.find("://"), host = scheme == std::string::npos ? 0 : scheme + 3;
  if (const size_t slash = address.find('/', host); slash != std::string::npos) {
    if (slash + 1 < address.size()) path = address.substr(slash);
    address.erase(slash);
  }
  auto http = HttpClient::create({address, options.api_key, options.tls}, std::chrono::seconds(2));
  if (!http.ok()) return Status(http.status().code(), "metrics: " + http.status().message());
  return std::unique_ptr<Target>(std::make_unique<WithMetrics>(std::move(target), std::move(*http), std::move(path)));
}

}  // namespace kvasir::client
