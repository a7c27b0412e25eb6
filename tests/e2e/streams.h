// Many kvasir.v1 streams at once over one channel, read by callbacks: what each said, and when.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kvasir.grpc.pb.h"

namespace kvasir::e2e {

using Clock = std::chrono::steady_clock;

class StreamReader final : public grpc::ClientReadReactor<v1::GenerateResponse> {
 public:
  StreamReader(v1::Inference::Stub& stub, v1::GenerateRequest request) : request_(std::move(request)) {
    stub.async()->Generate(&context_, &request_, this);
    StartRead(&event_);
    StartCall();
  }
  void OnReadDone(bool ok) override {
    if (!ok) return;
    if (event_.has_delta()) {
      std::lock_guard lock(mutex_);
      auto now = Clock::now();
      if (tokens.empty()) {
        first = now;
      } else {
        gaps.push_back(std::chrono::duration<double>(now - last_).count());
      }
      last_ = now;
      text += event_.delta().text();
      for (const auto& t : event_.delta().tokens()) tokens.push_back(t.id());
      changed_.notify_all();
    }
    if (event_.has_finished())
      reason = event_.finished().reason(), completion = event_.finished().usage().completion_tokens();
    StartRead(&event_);
  }
  void OnDone(const grpc::Status& s) override {
    std::lock_guard lock(mutex_);
    status = s;
    done_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_; });
  }
  // Until it has said something; false if it ended without.
  bool begun() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ || !tokens.empty(); });
    return !tokens.empty();
  }
  void cancel() { context_.TryCancel(); }
  bool done() {
    std::lock_guard lock(mutex_);
    return done_;
  }

  grpc::Status status;
  std::string text;
  std::vector<uint32_t> tokens;
  std::vector<double> gaps;
  Clock::time_point first{};
  v1::GenerateResponse::Finished::Reason reason{};
  uint64_t completion = 0;

 private:
  v1::GenerateRequest request_;
  grpc::ClientContext context_;
  v1::GenerateResponse event_;
  Clock::time_point last_{};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
};

inline std::unique_ptr<v1::Inference::Stub> connect(const std::string& address) {
  return v1::Inference::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
}

// Asks for the statistics until they are so, for a minute at most.
template <class F>
bool eventually(v1::Inference::Stub& stub, F so) {
  for (auto until = Clock::now() + std::chrono::seconds(60); Clock::now() < until;) {
    grpc::ClientContext context;
    v1::GetStatsResponse stats;
    if (stub.GetStats(&context, {}, &stats).ok() && so(stats)) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

inline v1::GenerateRequest greedy(std::string prompt, uint32_t max_tokens, bool ignore_eos = false) {
  v1::GenerateRequest r;
  r.set_prompt(std::move(prompt));
  r.set_max_tokens(max_tokens);
  r.set_ignore_eos(ignore_eos);
  r.mutable_sampling()->set_temperature(0);
  return r;
}

}  // namespace kvasir::e2e
