// Calls in the order they came, by connection: when there are too many, the connection that has the most of them loses
// its oldest, so that a client with a few calls loses none to one with thousands.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

namespace kvasir::server::rpc {

class Incoming;

class Crowd {
 public:
  struct Item {
    std::weak_ptr<Incoming> call;
    std::chrono::steady_clock::time_point since;
  };
  struct Connection {
    std::string peer;  // gRPC's name of its other end
    uint64_t number;   // older ones have lower numbers
    std::list<Item> items;
    bool dropped = false;  // it ends, and its calls with it
  };
  struct Place {
    Connection* connection;
    std::list<Item>::iterator item;
  };

  Place add(std::weak_ptr<Incoming> call, const std::string& peer) {
    auto [at, fresh] = connections_.try_emplace(peer, Connection{peer, next_, {}});
    next_ += fresh;
    Connection& connection = at->second;
    by_size_.erase(rank(connection));
    connection.items.push_back({std::move(call), std::chrono::steady_clock::now()});
    if (!connection.dropped) {
      by_size_[rank(connection)] = &connection;
      ++size_;
    }
    return {&connection, std::prev(connection.items.end())};
  }
  void remove(Place at) {
    Connection& connection = *at.connection;
    by_size_.erase(rank(connection));
    connection.items.erase(at.item);
    size_ -= !connection.dropped;
    if (connection.items.empty())
      connections_.erase(std::string(connection.peer));
    else if (!connection.dropped)
      by_size_[rank(connection)] = &connection;
  }
  // The connection that has the most, of two the older one; null: there are none but dropped ones.
  Connection* most() { return by_size_.empty() ? nullptr : by_size_.begin()->second; }
  void drop(Connection& connection) {
    by_size_.erase(rank(connection));
    size_ -= connection.items.size();
    connection.dropped = true;
  }

  size_t size() const { return size_; }  // without those of dropped connections
  template <class F>
  void each(F&& f) {
    for (auto& [_, connection] : connections_)
      for (Item& item : connection.items) f(item);
  }

 private:
  using Rank = std::pair<size_t, uint64_t>;
  static Rank rank(const Connection& c) { return {SIZE_MAX - c.items.size(), c.number}; }

  std::unordered_map<std::string, Connection> connections_;
  std::map<Rank, Connection*> by_size_;  // of those that are not dropped
  size_t size_ = 0;
  uint64_t next_ = 0;
};

}  // namespace kvasir::server::rpc
