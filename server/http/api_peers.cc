// Small routes that users of other servers have, under those servers' names.
#include "core/cat.h"
#include "server/http/api.h"
#include "server/http/error_body.h"
#include "server/http/fields.h"
#include "server/json_text.h"

namespace kvasir::server::http {

Reply Api::version(const HttpRequest&, const Caller&) {
  HttpResponse r;
  r.body = "{\"version\":\"" KVASIR_VERSION "\"}";
  return r;
}

// Requests that run or wait.
Reply Api::load(const HttpRequest&, const Caller&) {
  const engine::Stats s = services_.engine().stats();
  HttpResponse r;
  r.body = cat("{\"server_load\":", s.running + s.waiting, "}");
  return r;
}

Reply Api::abort(const HttpRequest& request, const Caller& caller) {
  auto json = parse_json(request.body);
  if (!json.ok()) return error_response(json.status());
  Fields f(*json);
  std::string id;
  bool all = false;
  f.boolean("abort_all", &all);
  if (!f.string("rid", &id) && !all) f.fail("rid", "is missing; say which request to end, or abort_all: true");
  if (Status s = f.finish(); !s.ok()) return error_response(s);
  if (all)
    services_.cancel_all(caller);
  else
    services_.cancel(caller, id);  // one that is not there has ended
  HttpResponse r;
  r.body = "{\"success\":true}";
  return r;
}

Reply Api::flush_cache(const HttpRequest&, const Caller&) {
  if (Status s = services_.engine().flush_prefix_cache(); !s.ok()) return error_response(s);
  HttpResponse r;
  r.body = "{\"success\":true}";
  return r;
}

Reply Api::load_adapter(const HttpRequest& request, const Caller& caller) {
  auto json = parse_json(request.body);
  if (!json.ok()) return error_response(json.status());
  Fields f(*json);
  std::string name, path;
  if (!f.string("lora_name", &name)) f.fail("lora_name", "is missing; give the adapter a name");
  if (!f.string("lora_path", &path)) f.fail("lora_path", "is missing; say where on the server the adapter is");
  f.unserved("load_inplace", "unload the adapter first; requests that run keep it");
  if (Status s = f.finish(); !s.ok()) return error_response(s);
  const auto loaded = services_.load_adapter(caller, name, path);
  if (!loaded.ok()) return error_response(loaded.status());
  HttpResponse r;
  r.body = cat("{\"success\":true,\"lora_name\":", json_string(name), ",\"rank\":", loaded->rank,
               ",\"bytes\":", loaded->bytes, "}");
  return r;
}

Reply Api::unload_adapter(const HttpRequest& request, const Caller& caller) {
  auto json = parse_json(request.body);
  if (!json.ok()) return error_response(json.status());
  Fields f(*json);
  std::string name;
  if (!f.string("lora_name", &name)) f.fail("lora_name", "is missing; say which adapter to unload");
  f.unserved("lora_int_id", "adapters are known by their names", "null");
  if (Status s = f.finish(); !s.ok()) return error_response(s);
  if (Status s = services_.unload_adapter(caller, name); !s.ok()) return error_response(s);
  HttpResponse r;
  r.body = cat("{\"success\":true,\"lora_name\":", json_string(name), "}");
  return r;
}

}  // namespace kvasir::server::http
