// What was used last, by name: bounded in number and in bytes, of the names and of what is kept; the least recently
// used go first.
#pragma once

#include <list>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace kvasir::text {

template <class T>
class RecentlyUsed {
 public:
  RecentlyUsed(size_t most, size_t most_bytes) : most_(most), most_bytes_(most_bytes) {}

  T* find(const std::string& name) {
    const auto found = by_name_.find(name);
    if (found == by_name_.end()) return nullptr;
    entries_.splice(entries_.begin(), entries_, found->second);
    return &found->second->value;
  }
  // `bytes`: of the value. What is larger than all of them may be is not kept; one that is there stays as it is.
  void keep(std::string name, T value, size_t bytes = 0) {
    bytes += name.size();
    if (bytes > most_bytes_ || by_name_.contains(name)) return;
    bytes_ += bytes;
    entries_.push_front({std::move(name), std::move(value), bytes});
    by_name_[entries_.front().name] = entries_.begin();
    while (entries_.size() > most_ || bytes_ > most_bytes_) {
      bytes_ -= entries_.back().bytes;
      by_name_.erase(entries_.back().name);
      entries_.pop_back();
    }
  }
  size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    std::string name;
    T value;
    size_t bytes;
  };
  using Entries = std::list<Entry>;
  const size_t most_, most_bytes_;
  size_t bytes_ = 0;
  Entries entries_;
  std::unordered_map<std::string_view, typename Entries::iterator> by_name_;  // the names in entries_
};

}  // namespace kvasir::text
