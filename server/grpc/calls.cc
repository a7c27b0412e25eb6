#include "server/grpc/calls.h"

#include <algorithm>
#include <vector>

#include "core/cat.h"
#include "server/grpc/incoming.h"

namespace kvasir::server::rpc {

namespace {
constexpr std::chrono::seconds kToBeRead{2};  // what a client that reads at all needs for a call's last words
constexpr double kForgivenASecond = 64;       // refusals of one connection
constexpr size_t kMostRemembered = 8192;      // connections
constexpr size_t kFewLeft = 16;               // calls
constexpr std::chrono::seconds kUntilFreed{2};
}  // namespace

Calls::Calls(CallLimits limits) : limits_(std::move(limits)), thread_([this] { look(); }) {}

void Calls::refused(const std::string& peer) {
  {
    std::lock_guard lock(mutex_);
    if (!counts(peer)) return;
  }
  if (limits_.drop) limits_.drop(peer);
}

bool Calls::counts(const std::string& peer) {
  const auto now = std::chrono::steady_clock::now();
  if (refusals_.size() > kMostRemembered) refusals_.clear();
  Refusals& of = refusals_.try_emplace(peer, Refusals{0, now}).first->second;
  of.level = std::max(0., of.level - kForgivenASecond * std::chrono::duration<double>(now - of.last).count()) + 1;
  of.last = now;
  if (of.level <= double(limits_.refusals)) return false;
  refusals_.erase(peer);
  return true;
}

bool Calls::enter(Incoming& call, bool guest) {
  std::shared_ptr<Incoming> goes;  // for it; ended without the lock
  std::string ends;                // a connection that lost too many
  {
    std::lock_guard lock(mutex_);
    if (stopped_) return false;
    if (guest) {
      if (guests_.size() >= limits_.guests) goes = guests_.most()->items.front().call.lock();
    } else if (known_ >= limits_.known || quiet_.size() >= limits_.silent) {
      if (Crowd::Connection* most = quiet_.most()) goes = most->items.front().call.lock();
      if (!goes) return false;
    }
    if (goes) {
      if (std::string peer = goes->call_->peer(); counts(peer)) ends = std::move(peer);
      out(*goes);
    }
    Seat& seat = call.seat_;
    if (guest) {
      seat.state = Seat::State::guest;
      seat.at = guests_.add(call.weak_from_this(), call.call_->peer());
    } else {
      seat.state = Seat::State::known;
      ++known_;
    }
  }
  if (goes)
    goes->end(
        {grpc::StatusCode::RESOURCE_EXHAUSTED, "the server has as many open calls as it may; this one waited longest"});
  if (!ends.empty() && limits_.drop) limits_.drop(ends);
  return true;
}

void Calls::waits(Incoming& call) {
  Seat& seat = call.seat_;
  {
    std::lock_guard lock(mutex_);
    if (seat.silent || (seat.state != Seat::State::guest && seat.state != Seat::State::known)) return;
    List& list = silent_[seat.state == Seat::State::known];
    seat.silent = true;
    seat.silent_at = list.insert(list.end(), call.weak_from_this());
    if (seat.state == Seat::State::known) seat.at = quiet_.add(call.weak_from_this(), call.call_->peer());
    seat.until = std::chrono::steady_clock::now() + limits_.silence;
    if (list.size() > 1) return;  // somebody is waited for already
  }
  wake_.notify_one();
}

void Calls::heard(Incoming& call) {
  std::lock_guard lock(mutex_);
  speaks(call);
}

void Calls::speaks(Incoming& call) {
  Seat& seat = call.seat_;
  if (!seat.silent) return;
  const bool known = seat.state == Seat::State::known;
  silent_[known].erase(seat.silent_at);
  if (known) quiet_.remove(seat.at);
  seat.silent = false;
}

void Calls::out(Incoming& call) {
  Seat& seat = call.seat_;
  speaks(call);
  if (seat.state == Seat::State::guest) guests_.remove(seat.at);
  if (seat.state == Seat::State::known) --known_;
  if (seat.state == Seat::State::leaving) leaving_.remove(seat.at);
  seat.state = Seat::State::outside;
}

std::string Calls::unread() {
  Crowd::Connection* most = leaving_.size() > limits_.unread ? leaving_.most() : nullptr;
  if (!most) return {};
  const bool time_left = most->items.front().since >= std::chrono::steady_clock::now() - kToBeRead;
  if (time_left && leaving_.size() <= 8 * limits_.unread) return {};
  leaving_.drop(*most);
  return most->peer;
}

void Calls::leaves(Incoming& call) {
  std::string peer;
  {
    std::lock_guard lock(mutex_);
    out(call);
    call.seat_.state = Seat::State::leaving;
    call.seat_.at = leaving_.add(call.weak_from_this(), call.call_->peer());
    peer = unread();
  }
  if (!peer.empty() && limits_.drop) limits_.drop(peer);
}

void Calls::left(Incoming& call) {
  bool fell = false, few = false;
  {
    std::lock_guard lock(mutex_);
    const size_t open = known_ + guests_.size() + leaving_.size();
    peak_.grew(open);
    out(call);
    fell = peak_.fell(open - 1);
    few = open - 1 <= kFewLeft && tidies_ == std::chrono::steady_clock::time_point::max();
    if (few) tidies_ = std::chrono::steady_clock::now() + kUntilFreed;
  }
  if (few) wake_.notify_one();
  if (fell) give_memory_back();
}

// Ends those whose time is over.
void Calls::look() {
  const grpc::Status late(grpc::StatusCode::DEADLINE_EXCEEDED,
                          cat("the call said nothing for ", limits_.silence.count(), " ms (header_timeout)"));
  std::unique_lock lock(mutex_);
  while (!stopped_) {
    const auto now = std::chrono::steady_clock::now();
    const bool tidies = tidies_ <= now;
    if (tidies) tidies_ = std::chrono::steady_clock::time_point::max();
    auto next = tidies_;
    std::vector<std::shared_ptr<Incoming>> over;
    for (List& list : silent_)
      while (!list.empty()) {
        std::shared_ptr<Incoming> first = list.front().lock();
        if (!first) {
          list.pop_front();
          continue;
        }
        if (first->seat_.until > now) {
          next = std::min(next, first->seat_.until);
          break;
        }
        speaks(*first);
        over.push_back(std::move(first));
      }
    if (!over.empty() || tidies) {
      lock.unlock();
      for (auto& call : over) call->end(late);
      over.clear();
      if (tidies) give_memory_back();
      lock.lock();
    } else if (next == std::chrono::steady_clock::time_point::max()) {
      wake_.wait(lock);
    } else {
      wake_.wait_until(lock, next);
    }
  }
}

void Calls::stop() {
  std::vector<std::shared_ptr<Incoming>> all;
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
    guests_.each([&](Crowd::Item& guest) {
      if (auto one = guest.call.lock()) all.push_back(std::move(one));
    });
    for (auto& call : silent_[1])
      if (auto one = call.lock()) all.push_back(std::move(one));
  }
  wake_.notify_all();
  for (auto& call : all) call->end({grpc::StatusCode::UNAVAILABLE, "the server is going away"});
  if (thread_.joinable()) thread_.join();
}

}  // namespace kvasir::server::rpc
