// Small routes that users of other servers have, under those servers' names.
#include "core/cat.h"
#include "server/http/api.h"
#include "server/http/error_body.h"
#include "server/http/fields.h"
#include "server/json_text.h"

namespace kvasir::server::http {

Reply Api::version(const Request&, const Caller&) {
  Response r;
  r.body = "{\"version\":\"" KVASIR_VERSION "\"}";
  return r;
}

// Requests that run or wait.
Reply Api::load(const Request&, const Caller&) {
  const engine::Stats s = services_.engine().stats();
  Response r;
  r.body = cat("{\"server_load\":", s.running + s.waiting, "}");
  return r;
}

Reply Api::abort(const Request& request, const Caller& caller) {
  auto json = parse_json(request.body);
  if (!json.ok()) return error_response(json.status());
  Fields f(*json);
  std::string id;
  if (!f.string("rid", &id)) f.fail("rid", "is missing; say which request to end");
  f.unserved("abort_all", "name each request");
  if (Status s = f.finish(); !s.ok()) return error_response(s);
  services_.cancel(caller, id);  // one that is not there has ended
  Response r;
  r.body = "{\"success\":true}";
  return r;
}

Reply Api::flush_cache(const Request&, const Caller&) {
  if (Status s = services_.engine().flush_prefix_cache(); !s.ok()) return error_response(s);
  Response r;
  r.body = "{\"success\":true}";
  return r;
}

}  // namespace kvasir::server::http
