// Earliest deadline first. A request that comes later may be due before one that waits, so whoever comes counts all of
// the queue (overload.cc): those due later were promised their time, too. Requests without a deadline are treated as
// due `patience` after their arrival, so that they cannot be put off for ever.
#include "scheduler/policy.h"

namespace kvasir::scheduler {
namespace {

class Deadline final : public KeyedPolicy {
 public:
  explicit Deadline(const Settings& o) : patience_(o.patience) {}
  bool promises() const override { return true; }
  double rank(const Sequence& s) const override { return due(s); }

 private:
  double due(const Sequence& s) const {
    return in_seconds(s.request->deadline.value_or(s.request->arrival + patience_));
  }
  double key(const Sequence& s) const override { return due(s); }

  Duration patience_;
};

}  // namespace

std::unique_ptr<Policy> make_deadline(const Settings& o) { return std::make_unique<Deadline>(o); }

}  // namespace kvasir::scheduler
