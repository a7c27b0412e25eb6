// How the files that read and check parameters reach the members of a request. Of parameters*.cc alone.
#pragma once

#include <type_traits>

#include "server/parameters.h"

namespace kvasir::server {

// The members of an input by kind, so that one visitor serves reading and checking.
template <class F>
auto visit_member(const Parameter& p, GenerateInput& in, F&& f) {
  return std::visit(
      [&](const auto& member) {
        return std::visit(
            [&](auto to) {
              if constexpr (std::is_same_v<std::decay_t<decltype(member)>, SamplingMember>)
                return f(in.request.sampling.*to);
              else
                return f(in.request.*to);
            },
            member);
      },
      p.to);
}
template <class F>
auto visit_member(const Parameter& p, const GenerateInput& in, F&& f) {
  return visit_member(p, const_cast<GenerateInput&>(in), [&](const auto& value) { return f(value); });
}

// What the client gave where it did not fit its member; null: it did.
inline const std::optional<int64_t>* unfit(const GenerateInput& in, const Parameter& p) {
  for (const auto& [row, value] : in.unfit)
    if (row == &p) return &value;
  return nullptr;
}

// How many others beside each token; -1 in such a member is none, and from a client all of them.
inline bool is_logprobs(const Parameter& p) { return p.most_option == &ServerOptions::max_logprobs; }

}  // namespace kvasir::server
