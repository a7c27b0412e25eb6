// Reading a JSON object field by field: each has a type, and what is left over is refused by name. The first thing that
// is wrong is kept; later reads do nothing.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "server/generate.h"
#include "server/json_text.h"

namespace kvasir::server::http {

using Json = nlohmann::ordered_json;

// Text to JSON within limits: nesting (so that no visitor overflows a stack), valid UTF-8, one value.
Result<Json> parse_json(std::string_view text, int max_depth = kMostJsonDepth);

// The string under a key, or none.
std::string text_of(const Json& object, const char* key);

// "messages[2].content must be a string", of that field.
Status wrong(const std::string& where, const std::string& what);

class Fields {
 public:
  explicit Fields(const Json& object, std::string path = "");

  bool has(std::string_view name);  // there and not null; it counts as read
  const Json* raw(std::string_view name);

  // Each leaves `out` alone when the field is absent or null, and says whether it was there.
  bool boolean(std::string_view name, bool* out);
  bool integer(std::string_view name, int64_t* out);
  bool number(std::string_view name, float* out);
  bool string(std::string_view name, std::string* out);
  bool enumeration(std::string_view name, std::string* out, const std::vector<std::string_view>& allowed);
  bool strings(std::string_view name, std::vector<std::string>* out, size_t most);  // a string is a list of one
  bool integers(std::string_view name, std::vector<int64_t>* out);

  // Those of the table that the protocol has (server/parameters.h), each to its member.
  void parameters(GenerateInput& in);

  // Fields this server knows and does not serve: refused when they ask for something else than what
  // is so anyway (`usual`, as JSON).
  void unserved(std::string_view name, const char* why, const char* usual = "false");
  // Fields that a client sends back as it got them, and that say nothing here (`annotations`).
  void note(std::string_view name) { read_.insert(std::string(name)); }
  // Every field that nobody read, with a line in the log.
  void pass_over_the_rest();

  void fail(std::string_view name, std::string message);
  void adopt(const Status& status);  // of what was read by other hands
  bool ok() const { return status_.ok(); }
  // The first mistake, or that a field is unknown.
  Status finish();

 private:
  const Json* find(std::string_view name);
  void wrong_type(std::string_view name, const Json& value, const char* wanted);
  std::string meant_by(std::string_view unknown) const;  // what to use instead, for a message; or nothing

  const Json& object_;
  std::string path_;
  std::set<std::string, std::less<>> read_;
  std::optional<Wire> wire_;  // whose parameters were read
  Status status_;
};

}  // namespace kvasir::server::http
