// Higher priority first, but a level is worth only `patience` of waiting: the order is that of
// arrival - priority * patience. So a request waits for nobody who came more than
// (difference of priorities) * patience after it, and the key never changes while it waits.
#include "scheduler/policy.h"

namespace kvasir::scheduler {
namespace {

class Priority final : public KeyedPolicy {
 public:
  explicit Priority(const Settings& o) : patience_(in_seconds(o.patience)) {}
  // A running sequence gives way only to one that would still be before it had both been waiting.
  bool displaces(const Sequence& waiting, const Sequence& running) const override {
    return waiting.request->priority > running.request->priority && key(waiting) < key(running);
  }
  Queued ahead(const Sequence& s, const Queued&, const Queued&) const override { return queue_.before_key(key(s)); }
  double rank(const Sequence& s) const override { return key(s); }

 private:
  double key(const Sequence& s) const override {
    return in_seconds(s.request->arrival) - s.request->priority * patience_;
  }
  double patience_;
};

}  // namespace

std::unique_ptr<Policy> make_priority(const Settings& o) { return std::make_unique<Priority>(o); }

}  // namespace kvasir::scheduler
