#include "scheduler/policy.h"

#include <utility>

#include "core/check.h"

namespace kvasir::scheduler {
namespace {

constexpr std::pair<const char*, std::unique_ptr<Policy> (*)(const Settings&)> kPolicies[] = {
    {"fcfs", make_fcfs},
    {"lpm", make_lpm},
    {"priority", make_priority},
    {"deadline", make_deadline},
    {"fair", make_fair}};

}  // namespace

std::vector<std::string> policy_names() {
  std::vector<std::string> names;
  for (const auto& [name, make] : kPolicies) names.emplace_back(name);
  return names;
}

Result<std::unique_ptr<Policy>> make_policy(const Settings& options) {
  std::string known;
  for (const auto& [name, make] : kPolicies) {
    if (options.policy == name) return make(options);
    known += (known.empty() ? "" : ", ") + std::string(name);
  }
  return invalid_argument(cat("policy is \"", options.policy, "\"; it must be one of ", known)).with_field("policy");
}

bool KeyedQueue::before(const Sequence* a, const Sequence* b) {
  if (a->key != b->key) return a->key < b->key;
  if (a->request->ordinal != b->request->ordinal) return a->request->ordinal < b->request->ordinal;
  return a->choice < b->choice;
}

void KeyedQueue::place(size_t i, Sequence* s) {
  heap_[i] = s;
  s->slot = static_cast<int32_t>(i);
}

void KeyedQueue::up(size_t i) {
  Sequence* s = heap_[i];
  for (; i > 0 && before(s, heap_[(i - 1) / 2]); i = (i - 1) / 2) place(i, heap_[(i - 1) / 2]);
  place(i, s);
}

void KeyedQueue::down(size_t i) {
  Sequence* s = heap_[i];
  for (size_t c; (c = 2 * i + 1) < heap_.size(); i = c) {
    if (c + 1 < heap_.size() && before(heap_[c + 1], heap_[c])) ++c;
    if (!before(heap_[c], s)) break;
    place(i, heap_[c]);
  }
  place(i, s);
}

void KeyedQueue::push(Sequence* s) {
  heap_.push_back(s);
  up(heap_.size() - 1);
}

void KeyedQueue::erase(Sequence* s) {
  size_t i = s->slot;
  KVASIR_CHECK(i < heap_.size() && heap_[i] == s, "sequence ", s->id, " is not queued");
  Sequence* last = heap_.back();
  heap_.pop_back();
  s->slot = -1;
  if (last == s) return;
  place(i, last);
  update(last);
}

Queued KeyedQueue::before_key(double key) const {
  Queued q;
  for (const Sequence* s : heap_) {
    if (s->key > key) continue;
    q.slots += s->queued_slots;
    q.tokens += s->queued_tokens;
  }
  return q;
}

void KeyedQueue::update(Sequence* s) {
  up(s->slot);
  down(s->slot);
}

}  // namespace kvasir::scheduler
