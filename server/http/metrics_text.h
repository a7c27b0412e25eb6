// What the server counts, as Prometheus text and as the page's JSON.
#pragma once

#include <string>

#include "server/services.h"

namespace kvasir::server::http {

std::string metrics_text(const Services& services);
std::string stats_json(const Services& services);

}  // namespace kvasir::server::http
