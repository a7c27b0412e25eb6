// Of a URL: what stands behind its question mark, and codes for characters.
#pragma once

#include <string>
#include <string_view>

namespace kvasir::server::http {

// The value of a parameter as it stands there; empty: it is not there.
std::string_view query_parameter(std::string_view query, std::string_view name);

// "a%2Fb" is "a/b". What is no such code stands for itself.
std::string percent_decoded(std::string_view text);

}  // namespace kvasir::server::http
