// First come, first served. Nobody waits for anyone who came later: the order is its own bound.
#include "scheduler/policy.h"

namespace kvasir::scheduler {
namespace {

class Fcfs final : public KeyedPolicy {
  double key(const Sequence& s) const override { return static_cast<double>(s.request->ordinal); }
};

}  // namespace

std::unique_ptr<Policy> make_fcfs(const Settings&) { return std::make_unique<Fcfs>(); }

}  // namespace kvasir::scheduler
