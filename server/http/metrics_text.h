// What the server counts, as Prometheus text and as the page's JSON.
#pragma once

#include <string>
#include <string_view>

#include "server/services.h"

namespace kvasir::server::http {

std::string metrics_text(const Services& services);
// An answer's header for balancers of load that ask for it (ORCA; `format` is TEXT or JSON, in any case); empty where
// they ask for nothing that is known.
std::string load_header(std::string_view format, const Services& services);
std::string stats_json(const Services& services);

}  // namespace kvasir::server::http
