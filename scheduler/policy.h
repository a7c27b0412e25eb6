// In which order waiting sequences are admitted. A policy is one small file in policies/.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/clock.h"
#include "core/status.h"
#include "kvcache/kv_space.h"
#include "scheduler/options.h"
#include "scheduler/sequence.h"

namespace kvasir::scheduler {

// Of sequences that wait.
struct Queued {
  int64_t slots = 0;   // they will run in
  int64_t tokens = 0;  // to be computed before their next one is sampled
};

class Policy {
 public:
  virtual ~Policy() = default;
  virtual void push(Sequence* s) = 0;
  virtual void erase(Sequence* s) = 0;
  virtual Sequence* best(Time now) = 0;  // stays queued until erased; null: none
  virtual size_t size() const = 0;
  // What would run before one that came now, of `all` that waits and of its `tenants` part of that.
  virtual Queued ahead(const Sequence&, const Queued& all, const Queued& /*tenants*/) const { return all; }
  // Whether one whose deadline cannot be kept is refused though nobody waits.
  virtual bool promises() const { return false; }
  // Whether `running` should make room for `waiting` at once.
  virtual bool displaces(const Sequence& /*waiting*/, const Sequence& /*running*/) const { return false; }
  // The order of the running ones, least first: decodes are planned in it, and the last one loses its pages first.
  virtual double rank(const Sequence& s) const { return static_cast<double>(s.request->ordinal); }
  virtual void tenant(int32_t /*index*/, const std::string& /*name*/) {}  // before its first sequence
  virtual void weigh(int32_t /*index*/, double /*weight*/) {}             // of a tenant, from now on
  virtual void started(const Sequence&) {}                                // runs from now on
  virtual void stopped(const Sequence&) {}                                // ended or preempted
  virtual void served(const Sequence&, int64_t /*tokens*/) {}
  // Whether a prefill may fill up a step whose first prefill is `lead`: a longer step delays that one.
  virtual bool may_join(const Sequence& /*lead*/, const Sequence& /*candidate*/) const { return true; }
  // Whether the best of the waiting goes before prefills that have begun.
  virtual bool goes_first(const Sequence& /*waiting*/, const Sequence& /*prefilling*/) const { return false; }
  virtual void order_prefills(std::vector<Sequence*>&) const {}
  // Once a step, to keep what it knows fresh within a bounded time.
  virtual void refresh(kvcache::KvSpace&) {}
};

Result<std::unique_ptr<Policy>> make_policy(const Settings& options);
std::vector<std::string> policy_names();

// The least key first; equal keys by arrival.
class KeyedQueue {
 public:
  void push(Sequence* s);
  void erase(Sequence* s);
  void update(Sequence* s);  // its key has changed
  Sequence* best() const { return heap_.empty() ? nullptr : heap_.front(); }
  size_t size() const { return heap_.size(); }
  Sequence* at(size_t i) const { return heap_[i]; }
  Queued before_key(double key) const;  // what goes before one of this key; looks at each

 private:
  static bool before(const Sequence* a, const Sequence* b);
  void place(size_t i, Sequence* s);
  void up(size_t i);
  void down(size_t i);
  std::vector<Sequence*> heap_;
};

// A policy whose order is one number that does not change while a sequence waits.
class KeyedPolicy : public Policy {
 public:
  void push(Sequence* s) override {
    s->key = key(*s);
    queue_.push(s);
  }
  void erase(Sequence* s) override { queue_.erase(s); }
  Sequence* best(Time) override { return queue_.best(); }
  size_t size() const override { return queue_.size(); }

 protected:
  virtual double key(const Sequence& s) const = 0;
  KeyedQueue queue_;
};

inline double in_seconds(Duration d) { return std::chrono::duration<double>(d).count(); }
inline double in_seconds(Time t) { return in_seconds(t.time_since_epoch()); }

std::unique_ptr<Policy> make_fcfs(const Settings&);
std::unique_ptr<Policy> make_lpm(const Settings&);
std::unique_ptr<Policy> make_priority(const Settings&);
std::unique_ptr<Policy> make_deadline(const Settings&);
std::unique_ptr<Policy> make_fair(const Settings&);

}  // namespace kvasir::scheduler
