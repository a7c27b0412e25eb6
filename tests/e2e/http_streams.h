// Many streamed completions at once over HTTP, each on a connection of its own and all read by one thread: what each
// said, and when.
#pragma once

#include <fcntl.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/server/http_client.h"

namespace kvasir::e2e {

class HttpStreams {
 public:
  struct Stream {
    bool finished = false;  // the last event came
    std::string text;
    int64_t tokens = 0;        // as the usage says
    std::vector<double> gaps;  // between reads that brought tokens
  };

  // Connects and asks; the answers come with read().
  HttpStreams(int port, const std::vector<std::string>& bodies) : answers_(bodies.size()) {
    for (size_t i = 0; i < bodies.size(); ++i) {
      server::RawClient& c = *clients_.emplace_back(std::make_unique<server::RawClient>(port));
      c.send(server::RawClient::post("/v1/completions", bodies[i]));
    }
  }
  // Until all are over, or nothing comes for so long.
  std::vector<Stream> read(std::chrono::milliseconds silence) {
    using Clock = std::chrono::steady_clock;
    std::vector<pollfd> all;
    for (auto& c : clients_) all.push_back({c->descriptor(), POLLIN, 0});
    for (size_t open = all.size(); open > 0;) {
      if (::poll(all.data(), all.size(), int(silence.count())) <= 0) break;
      auto now = Clock::now();
      for (size_t i = 0; i < all.size(); ++i) {
        if (all[i].revents == 0) continue;
        char block[65536];
        ssize_t n = ::recv(all[i].fd, block, sizeof block, 0);
        if (n > 0) answers_[i].bytes.append(block, size_t(n));
        bool ended = n <= 0 || answers_[i].bytes.ends_with("data: [DONE]\n\n\r\n0\r\n\r\n");
        answers_[i].read(now, ended);
        if (!ended) continue;
        all[i].fd = -1;
        --open;
      }
    }
    std::vector<Stream> out;
    for (Answer& a : answers_) out.push_back(std::move(a.stream));
    return out;
  }

 private:
  struct Answer {
    Stream stream;
    std::string bytes;
    size_t at = 0;
    std::chrono::steady_clock::time_point last{};

    // Events begin their line; the sizes of chunks between them are passed over.
    void read(std::chrono::steady_clock::time_point now, bool ended) {
      bool brought = false;
      for (size_t end; (at = bytes.find("data: ", at)) != bytes.npos && (end = bytes.find("\n\n", at)) != bytes.npos;
           at = end) {
        std::string event = bytes.substr(at + 6, end - at - 6);
        if (event == "[DONE]") {
          stream.finished = true;
          continue;
        }
        auto json = nlohmann::json::parse(event, nullptr, false);
        if (json.is_discarded()) break;
        for (auto& choice : json["choices"]) {
          brought |= choice["finish_reason"].is_null();
          stream.text += choice.value("text", "");
        }
        if (json.contains("usage") && json["usage"].is_object()) stream.tokens = json["usage"]["completion_tokens"];
      }
      if (at == bytes.npos) at = bytes.size() < 8 ? 0 : bytes.size() - 8;
      if (brought && last != std::chrono::steady_clock::time_point{})
        stream.gaps.push_back(std::chrono::duration<double>(now - last).count());
      if (brought) last = now;
      if (ended) bytes.clear(), at = 0;
    }
  };

  std::vector<std::unique_ptr<server::RawClient>> clients_;
  std::vector<Answer> answers_;
};

}  // namespace kvasir::e2e
