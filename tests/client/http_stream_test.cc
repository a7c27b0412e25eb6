#include "client/http_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvasir::client {
namespace {

struct Read {
  bool http = true, done = false, keep_alive = false;
  int status = 0;
  std::string body;
};

Read read(std::string_view bytes, size_t step) {
  HttpStream s;
  Read r;
  for (size_t i = 0; i < bytes.size() && r.http; i += step) {
    r.http = s.feed(bytes.substr(i, step), [&](std::string_view b) { r.body += b; });
  }
  r.done = s.done();
  r.status = s.status();
  r.keep_alive = s.keep_alive();
  return r;
}

TEST(HttpStream, LengthChunksAndTheConnectionsEnd) {
  for (const size_t step : {1, 2, 5, 1000}) {
    Read r = read("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", step);
    EXPECT_TRUE(r.done && r.keep_alive);
    EXPECT_EQ(r.body, "hello");
    r = read(
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: "
        "close\r\n\r\n5\r\nhello\r\nA;x=1\r\n0123456789\r\n0\r\n\r\n",
        step);
    EXPECT_TRUE(r.done);
    EXPECT_FALSE(r.keep_alive);
    EXPECT_EQ(r.body, "hello0123456789");
    r = read("HTTP/1.1 429 Too Many\r\nContent-Length: 0\r\n\r\n", step);
    EXPECT_TRUE(r.done);
    EXPECT_EQ(r.status, 429);
    r = read("HTTP/1.0 200 OK\r\n\r\nuntil it ends", step);
    EXPECT_FALSE(r.done || r.keep_alive);
    EXPECT_EQ(r.body, "until it ends");
    r = read("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", step);
    EXPECT_EQ(r.status, 200);
    EXPECT_EQ(r.body, "x");
  }
}

// llama-server sends the last chunk and the empty line after it apart: what is left unread would begin the next answer.
TEST(HttpStream, IsOverWithTheLastByteOfItsLastChunk) {
  const std::string head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", body = "5\r\nhello\r\n";
  for (const std::string end : {"0\r\n\r\n", "0\r\nTrailer: x\r\n\r\n"}) {
    const std::string all = head + body + end;
    for (size_t cut = head.size(); cut < all.size(); ++cut) {
      HttpStream s;
      const auto ignore = [](std::string_view) {};
      EXPECT_TRUE(s.feed(all.substr(0, cut), ignore));
      EXPECT_FALSE(s.done()) << cut;
      EXPECT_EQ(s.ends_with_connection(), cut >= head.size() + body.size() + 3) << cut;  // all of the body was there
      EXPECT_TRUE(s.feed(all.substr(cut), ignore));
      EXPECT_TRUE(s.done()) << cut;
    }
  }
}

TEST(HttpStream, WhatIsNotHttp) {
  for (const char* bytes : {"SSH-2.0\r\n\r\n", "HTTP/1.1 abc\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: -4\r\n\r\n",
                            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"}) {
    EXPECT_FALSE(read(bytes, 1000).http) << bytes;
  }
  EXPECT_FALSE(read(std::string(100000, 'x'), 1000).http);
}

TEST(EventLines, HoweverTheyAreCut) {
  const std::string text = "data: {\"a\":1}\r\n\r\n: comment\nevent: x\ndata:two\n\ndata: [DONE]\n\n";
  for (const size_t step : {1, 3, 1000}) {
    EventLines lines;
    std::vector<std::string> got;
    for (size_t i = 0; i < text.size(); i += step) {
      lines.feed(std::string_view(text).substr(i, step), [&](std::string_view e) { got.emplace_back(e); });
    }
    EXPECT_THAT(got, ::testing::ElementsAre("{\"a\":1}", "two", "[DONE]"));
  }
}

}  // namespace
}  // namespace kvasir::client
