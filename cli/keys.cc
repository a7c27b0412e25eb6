// kvasir keys add|list|revoke: who may use a server. A key is shown once; the file holds its hash.
#include <cstdio>
#include <ctime>

#include "cli/command.h"
#include "core/config.h"
#include "server/keys.h"

namespace kvasir::cli {
namespace {

struct KeysConfig {
  std::string action, id, file = "keys.json", tenant;
  std::vector<std::string> roles, adapters;
  int priority = 0;
  double weight = 1;
  server::TenantLimits limits;

  void define(Options& o) {
    o.positional("action", &action, "add, list or revoke").one_of({"add", "list", "revoke"});
    o.positional("id", &id, "revoke: which key, as list names it");
    o.add("keys", &file, "The key file, as kvasir serve --keys takes it").value_name("FILE");
    o.section("For add");
    o.add("tenant", &tenant, "Who it is for: keys of one tenant share limits, requests and cached prompts");
    o.add("role", &roles, "What it may do: user, metrics or admin (user when none is given)");
    o.add("priority", &priority, "Highest priority its requests may ask for").range(-1000, 1000);
    o.add("weight", &weight, "Its tenant's share under the policy fair; of several keys, the one that asked last")
        .range(0.001, 1000);
    o.add("requests_per_minute", &limits.requests_per_minute, "0: no limit").at_least(0);
    o.add("tokens_per_minute", &limits.tokens_per_minute, "Prompt and output; 0: no limit").at_least(0);
    o.add("concurrent", &limits.concurrent, "Requests at once; 0: no limit").at_least(0);
    o.add("adapter", &adapters,
          "A model's name it may use, the served model's or an adapter's (lora), and none but those named; where it is "
          "one alone, requests that name no model are for it")
        .value_name("NAME");
    o.check([this]() -> Status {
      if (!id.empty() && action != "revoke")
        return invalid_argument(cat("'", id, "' means nothing to ", action, "; only revoke takes a key's id"));
      return {};
    });
    o.example("kvasir keys add --tenant acme", "make a key and show it, once");
    o.example("kvasir keys add --tenant ops --role metrics --role admin", "more than generating");
    o.example("kvasir keys add --tenant acme --adapter sql", "for one of the server's adapters alone");
    o.example("kvasir keys list", "who has a key");
    o.example("kvasir keys revoke k-3f9a", "take one back: a running server sees it within seconds");
  }
};

int failed(const Status& status) {
  std::fprintf(stderr, "kvasir keys: %s\n", status.message().c_str());
  return kFailed;
}

int add(const KeysConfig& c) {
  server::KeyEntry entry;
  entry.caller.tenant = c.tenant;
  entry.caller.user = c.roles.empty();
  for (const std::string& role : c.roles) {
    if (role == "user") {
      entry.caller.user = true;
    } else if (role == "metrics") {
      entry.caller.metrics = true;
    } else if (role == "admin") {
      entry.caller.admin = true;
    } else {
      std::fprintf(stderr, "kvasir keys: role is '%s'; the roles are user, metrics and admin\n", role.c_str());
      return kUsage;
    }
  }
  entry.caller.priority_ceiling = c.priority;
  entry.caller.weight = c.weight;
  entry.caller.limits = c.limits;
  entry.caller.adapters = c.adapters;
  if (c.tenant.empty()) {
    std::fprintf(stderr, "kvasir keys: a key needs a tenant: --tenant NAME\n");
    return kUsage;
  }
  auto key = server::add_key(c.file, std::move(entry));
  if (!key.ok()) return failed(key.status());
  std::printf("%s\n", key->c_str());
  std::fprintf(stderr, "This is the only time the key is shown; %s holds its hash.\n", c.file.c_str());
  return kOk;
}

int list(const KeysConfig& c) {
  auto entries = server::read_keys(c.file);
  if (!entries.ok()) return failed(entries.status());
  constexpr const char* kRow = "%-14s %-20s %-20s %8s %8s %12s %12s %8s  %s\n";
  const auto limit = [](int64_t most) { return most > 0 ? cat(most) : std::string("-"); };
  std::printf(kRow, "key", "tenant", "roles", "priority", "weight", "requests/min", "tokens/min", "at once", "made");
  for (const auto& e : *entries) {
    std::string roles;
    for (auto [has, name] :
         {std::pair(e.caller.user, "user"), {e.caller.metrics, "metrics"}, {e.caller.admin, "admin"}})
      if (has) roles += (roles.empty() ? "" : ",") + std::string(name);
    char made[32] = "";
    std::time_t at = e.created;
    std::tm utc{};
    std::strftime(made, sizeof made, "%Y-%m-%d %H:%M", gmtime_r(&at, &utc));
    const server::TenantLimits& limits = e.caller.limits;
    std::printf(kRow, e.id.c_str(), e.caller.tenant.c_str(), roles.c_str(), cat(e.caller.priority_ceiling).c_str(),
                cat(e.caller.weight).c_str(), limit(limits.requests_per_minute).c_str(),
                limit(limits.tokens_per_minute).c_str(), limit(limits.concurrent).c_str(), made);
  }
  return kOk;
}

int keys(int argc, char** argv) {
  KeysConfig config;
  Options o("kvasir keys", "Makes, lists and takes back the API keys of a server.");
  config.define(o);
  if (auto code = o.parse(argc, argv)) return *code;
  if (config.action == "add") return add(config);
  if (config.action == "list") return list(config);
  if (config.action == "revoke" && !config.id.empty()) {
    Status done = server::revoke_key(config.file, config.id);
    if (!done.ok()) return failed(done);
    std::fprintf(stderr, "%s is revoked.\n", config.id.c_str());
    return kOk;
  }
  std::fprintf(stderr, config.action.empty() ? "kvasir keys: add, list or revoke?\n"
                                             : "kvasir keys: revoke which key? `kvasir keys list` names them\n");
  return kUsage;
}

}  // namespace

extern const Command keys_command;
const Command keys_command{"keys", "make, list and revoke API keys", keys};

}  // namespace kvasir::cli
