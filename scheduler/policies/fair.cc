// Fair share by tenant: each has an account of the tokens computed for it, divided by its weight, and the
// one with the least on it goes first. A tenant that comes back after a pause starts from the least account
// of those at work, less a burst of a few steps: so idleness saves up little, and who asks for less than its
// share does not wait behind those who ask for more. Within a tenant, first come first served.
//
// A tenant with w of the weight at work gets at least w of the tokens, less the others' bursts.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "scheduler/policy.h"

namespace kvasir::scheduler {
namespace {

class FairShare final : public Policy {
 public:
  explicit FairShare(const Settings& o)
      : weights_(o.tenant_weights), burst_(static_cast<double>(kBurstSteps * o.max_tokens_per_step)) {}

  void tenant(int32_t index, const std::string& name) override {
    accounts_.resize(index + 1);
    auto it = weights_.find(name);
    if (it != weights_.end()) accounts_[index].weight = it->second;
  }
  void weigh(int32_t index, double weight) override { accounts_[index].weight = weight; }
  void push(Sequence* s) override {
    Account& a = account(*s);
    if (a.queue.size() == 0 && a.running == 0) a.served = std::max(a.served, least_at_work() - burst_ / a.weight);
    s->key = static_cast<double>(s->request->ordinal);
    a.queue.push(s);
    ++size_;
  }
  void erase(Sequence* s) override {
    account(*s).queue.erase(s);
    --size_;
  }
  Sequence* best(Time) override {
    Account* best = nullptr;
    for (Account& a : accounts_)
      if (a.queue.size() > 0 && (best == nullptr || before(a, *best))) best = &a;
    return best == nullptr ? nullptr : best->queue.best();
  }
  size_t size() const override { return size_; }
  // Its tenant's turn comes in the measure of its weight among those at work.
  Queued ahead(const Sequence& s, const Queued& all, const Queued& tenants) const override {
    double weight = 0;
    const Account& own = accounts_[s.request->tenant];
    for (const Account& a : accounts_)
      if (&a == &own || a.running + static_cast<int64_t>(a.queue.size()) > 0) weight += a.weight;
    const auto of = [&](int64_t mine, int64_t most) {
      return std::min(most, static_cast<int64_t>(std::ceil(static_cast<double>(mine) * weight / own.weight)));
    };
    return {of(tenants.slots, all.slots), of(tenants.tokens, all.tokens)};
  }
  void served(const Sequence& s, int64_t tokens) override {
    Account& a = account(s);
    a.served += static_cast<double>(tokens) / a.weight;
  }
  void started(const Sequence& s) override { ++account(s).running; }
  void stopped(const Sequence& s) override { --account(s).running; }
  // A tenant above its share of those that run gives one up to a tenant that is below its own.
  bool displaces(const Sequence& waiting, const Sequence& running) const override {
    const Account &w = accounts_[waiting.request->tenant], &r = accounts_[running.request->tenant];
    if (!before(w, r)) return false;
    double weight = 0, sequences = 0;
    for (const Account& a : accounts_) {
      if (a.running + static_cast<int64_t>(a.queue.size()) == 0) continue;
      weight += a.weight;
      sequences += static_cast<double>(a.running);
    }
    return static_cast<double>(r.running) > sequences * r.weight / weight &&
           static_cast<double>(w.running + 1) <= sequences * w.weight / weight;
  }
  // A tenant that runs little gets its first token without waiting for the bulk of another.
  bool may_join(const Sequence& lead, const Sequence& candidate) const override {
    const Account &l = accounts_[lead.request->tenant], &c = accounts_[candidate.request->tenant];
    return &l == &c || static_cast<double>(l.running) / l.weight * 4 > static_cast<double>(c.running) / c.weight;
  }
  bool goes_first(const Sequence& waiting, const Sequence& prefilling) const override {
    return before(accounts_[waiting.request->tenant], accounts_[prefilling.request->tenant]);
  }
  void order_prefills(std::vector<Sequence*>& prefills) const override {
    std::stable_sort(prefills.begin(), prefills.end(), [&](const Sequence* a, const Sequence* b) {
      return accounts_[a->request->tenant].served < accounts_[b->request->tenant].served;
    });
  }

 private:
  struct Account {
    double weight = 1, served = 0;
    int64_t running = 0;
    KeyedQueue queue;
  };

  static bool before(const Account& a, const Account& b) {
    return a.served != b.served ? a.served < b.served : a.running < b.running;
  }
  Account& account(const Sequence& s) { return accounts_[s.request->tenant]; }
  double least_at_work() const {
    double least = std::numeric_limits<double>::max();
    for (const Account& a : accounts_)
      if (a.queue.size() > 0 || a.running > 0) least = std::min(least, a.served);
    return least == std::numeric_limits<double>::max() ? 0 : least;
  }

  static constexpr int64_t kBurstSteps = 16;
  std::map<std::string, double> weights_;
  double burst_;
  std::vector<Account> accounts_;
  size_t size_ = 0;
};

}  // namespace

std::unique_ptr<Policy> make_fair(const Settings& o) { return std::make_unique<FairShare>(o); }

}  // namespace kvasir::scheduler
