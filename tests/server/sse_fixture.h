// Server-sent events with names, as Anthropic's and OpenAI's newer protocols have them.
#pragma once

#include <chrono>
#include <thread>

#include "tests/server/http_fixture.h"

namespace kvasir::server {

class SseFixture : public HttpFixture {
 protected:
  // A line of /metrics. It may come a moment after the answer that it counts.
  bool counted(std::string_view line) {
    for (int tries = 0; tries < 500; ++tries) {
      if (ask(RawClient::get("/metrics")).body.find(line) != std::string::npos) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return false;
  }
  // Each event's data, whose type is the event's name.
  std::vector<Json> events(std::string_view path, const std::string& body) { return parsed(post(path, body)); }
  static std::vector<Json> parsed(const RawClient::Answer& a) {
    EXPECT_EQ(a.status, 200) << a.body;
    EXPECT_NE(a.head.find("text/event-stream"), std::string::npos);
    std::vector<Json> out;
    std::string_view rest = a.body;
    while (!rest.empty()) {
      const size_t end = rest.find("\n\n"), line = rest.find('\n');
      if (end == std::string_view::npos || !rest.starts_with("event: ") || rest.substr(line + 1, 6) != "data: ") {
        ADD_FAILURE() << rest;
        break;
      }
      out.push_back(Json::parse(rest.substr(line + 7, end - line - 7)));
      EXPECT_EQ(out.back()["type"], rest.substr(7, line - 7));
      rest.remove_prefix(end + 2);
    }
    return out;
  }
  static std::vector<std::string> types(const std::vector<Json>& events) {
    std::vector<std::string> out;
    for (const Json& e : events)
      if (out.empty() || out.back() != e["type"]) out.push_back(e["type"]);
    return out;
  }
};

}  // namespace kvasir::server
