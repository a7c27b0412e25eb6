// A server over the scripted engine, and OpenAI's server-sent events.
#pragma once

#include "tests/server/http_fixture.h"

namespace kvasir::server {

class OpenAi : public HttpFixture {
 protected:
  std::vector<Json> streamed(std::string_view path, const std::string& body) {
    RawClient::Answer a = post(path, body);
    EXPECT_EQ(a.status, 200) << a.body;
    EXPECT_NE(a.head.find("text/event-stream"), std::string::npos);
    std::vector<Json> events;
    std::string_view rest = a.body;
    while (!rest.empty()) {
      size_t end = rest.find("\n\n");
      std::string_view line = rest.substr(0, end);
      rest.remove_prefix(end + 2);
      EXPECT_TRUE(line.starts_with("data: "));
      line.remove_prefix(6);
      if (line == "[DONE]") {
        EXPECT_TRUE(rest.empty());
        return events;
      }
      events.push_back(Json::parse(line));
    }
    ADD_FAILURE() << "no [DONE]";
    return events;
  }
};

}  // namespace kvasir::server
