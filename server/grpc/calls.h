// The calls of the port that are open, so that their number is bounded in total and not for each connection: what a
// call takes in gRPC, some 20 KiB, is taken by a header alone.
//
// A call that has said nothing yet has a time to do so, and is the first to go when there are too many. These, and
// calls that need no key (health, reflection), are few: when another comes, the connection that has the most loses its
// oldest, so nobody is locked out. A connection that lost many, or had many refused for their key, ends. Calls that are
// over and whose last words nobody reads end with their connection. When few are left, what they held goes back to the
// system: a moment later, since gRPC frees messages that were half sent after the calls.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

#include "server/grpc/crowd.h"
#include "server/memory.h"

namespace kvasir::server::rpc {

struct CallLimits {
  size_t known = 8192;    // of callers who may
  size_t silent = 2048;   // of these, that have said nothing yet
  size_t guests = 512;    // of methods that ask for no key
  size_t unread = 2048;   // over, and their clients take their time; eight times as many at any moment
  size_t refusals = 128;  // for want of a key, a method or a place, of one connection; some are forgiven every second
  std::chrono::milliseconds silence{10'000};
  std::function<void(const std::string& peer)> drop;  // ends a connection
};

class Calls {
 public:
  explicit Calls(CallLimits limits);
  ~Calls() { stop(); }

  // A call's place here; each call has one.
  class Seat {
    friend class Calls;
    using Place = std::list<std::weak_ptr<Incoming>>::iterator;
    enum class State : uint8_t { outside, guest, known, leaving } state = State::outside;
    bool silent = false;
    Crowd::Place at;  // of guests, of those that leave, or of the silent who are known
    Place silent_at;
    std::chrono::steady_clock::time_point until;
  };

  void refused(const std::string& peer);   // a call of this connection, which ends where there are many
  bool enter(Incoming& call, bool guest);  // false: there are too many
  void waits(Incoming& call);              // it is to say something now
  void heard(Incoming& call);              // it has
  void leaves(Incoming& call);             // its last words are on their way
  void left(Incoming& call);
  void stop();  // ends the guests and the silent, so that the port can close

 private:
  struct Refusals {
    double level;
    std::chrono::steady_clock::time_point last;
  };
  using List = std::list<std::weak_ptr<Incoming>>;
  void look();
  // Under the lock.
  void speaks(Incoming& call);
  void out(Incoming& call);              // of all lists
  bool counts(const std::string& peer);  // one more refusal; true: the connection is to end for it
  std::string unread();                  // the connection that is to end for it; empty: none

  const CallLimits limits_;
  std::mutex mutex_;
  std::condition_variable wake_;
  Crowd guests_, leaving_, quiet_;  // quiet: known and silent
  List silent_[2];                  // guests, known; each in the order of their times
  size_t known_ = 0;
  std::unordered_map<std::string, Refusals> refusals_;  // by connection
  PeakWatch peak_;
  std::chrono::steady_clock::time_point tidies_ = std::chrono::steady_clock::time_point::max();  // never
  bool stopped_ = false;
  std::thread thread_;  // sleeps while nobody is silent, and there is nothing to give back
};

}  // namespace kvasir::server::rpc
