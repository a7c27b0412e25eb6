#include "server/span_exporter.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <random>

#include "core/cat.h"
#include "core/log.h"
#include "server/json_text.h"

namespace kvasir::server {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
constexpr size_t kMostQueued = 4096, kMostSent = 512;
constexpr seconds kGather{1};     // how long the first span waits for others
constexpr seconds kAnswer{5};     // for a collector's answer
constexpr seconds kPatience{30};  // between attempts at most

std::string random_hex(size_t digits) {
  thread_local std::mt19937_64 draw{std::random_device{}()};
  static constexpr char hex[] = "0123456789abcdef";
  std::string out(digits, '0');
  for (char& c : out) c = hex[draw() & 15];
  if (out.find_first_not_of('0') == out.npos) out.back() = '1';
  return out;
}

std::string unix_nanoseconds(Time t) {
  auto wall = std::chrono::system_clock::now() + (t - std::chrono::steady_clock::now());
  return cat('"', std::chrono::duration_cast<std::chrono::nanoseconds>(wall.time_since_epoch()).count(), '"');
}

std::string text_attribute(std::string_view key, std::string_view value) {
  return cat("{\"key\":", json_string(key), ",\"value\":{\"stringValue\":", json_string(value), "}}");
}

void append_span(std::string& out, const Span& s) {
  out += cat("{\"traceId\":\"", s.context.trace_id, "\",\"spanId\":\"", random_hex(16), '"');
  if (!s.context.parent_id.empty()) out += cat(",\"parentSpanId\":\"", s.context.parent_id, '"');
  out += cat(",\"name\":", json_string(s.name), ",\"kind\":2,\"startTimeUnixNano\":", unix_nanoseconds(s.began),
             ",\"endTimeUnixNano\":", unix_nanoseconds(s.ended), ",\"attributes\":[");
  const char* comma = "";
  for (const auto& [key, value] : s.texts) out += cat(std::exchange(comma, ","), text_attribute(key, value));
  for (const auto& [key, value] : s.numbers)  // 64-bit integers are text in protobuf's JSON
    out += cat(std::exchange(comma, ","), "{\"key\":", json_string(key), ",\"value\":{\"intValue\":\"", value, "\"}}");
  out += "],\"events\":[";
  comma = "";
  for (const auto& [name, at] : s.events)
    out += cat(std::exchange(comma, ","), "{\"name\":", json_string(name), ",\"timeUnixNano\":", unix_nanoseconds(at),
               '}');
  out += "],\"status\":{";
  out += s.error.empty() ? std::string("\"code\":1") : cat("\"code\":2,\"message\":", json_string(s.error));
  out += "}}";
}

struct Descriptor {
  int fd = -1;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

Status ready(int fd, short what, Time until) {
  auto left = std::chrono::ceil<milliseconds>(until - std::chrono::steady_clock::now()).count();
  pollfd p{fd, what, 0};
  if (left <= 0 || ::poll(&p, 1, int(left)) <= 0) return {Code::deadline_exceeded, "it does not answer in time"};
  return {};
}

Status connect_to(const CollectorAddress& to, Time until, Descriptor& out) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (int e = ::getaddrinfo(to.host.c_str(), std::to_string(to.port).c_str(), &hints, &found))
    return unavailable(::gai_strerror(e));
  Status why = unavailable("it has no address");
  for (addrinfo* a = found; a; a = a->ai_next) {
    Descriptor s{::socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
    int error = ::connect(s.fd, a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      why = ready(s.fd, POLLOUT, until);
      if (!why.ok()) continue;
      socklen_t size = sizeof error;
      ::getsockopt(s.fd, SOL_SOCKET, SO_ERROR, &error, &size);
    }
    why = error == 0 ? Status() : unavailable(std::strerror(error));
    if (error != 0) continue;
    std::swap(out.fd, s.fd);
    break;
  }
  ::freeaddrinfo(found);
  return why;
}

}  // namespace

Result<CollectorAddress> parse_collector(const std::string& url) {
  auto refuse = [&](const char* why) {
    return invalid_argument(cat("otlp_endpoint is '", url, "'; ", why)).with_field("otlp_endpoint");
  };
  constexpr std::string_view kScheme = "http://";
  if (url.starts_with("https://"))
    return refuse("spans go over plain http to a collector on this machine or network, which may pass them on by TLS");
  if (!url.starts_with(kScheme)) return refuse("it must be http://HOST[:PORT][/PATH]");
  std::string_view rest = std::string_view(url).substr(kScheme.size());
  CollectorAddress out;
  size_t slash = rest.find('/');
  if (slash != rest.npos && slash + 1 < rest.size()) out.path = rest.substr(slash);
  std::string_view host = rest.substr(0, slash);
  size_t colon = host.rfind(':');
  if (colon != host.npos && host.back() != ']') {
    std::string_view port = host.substr(colon + 1);
    auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), out.port);
    if (error != std::errc() || end != port.data() + port.size() || out.port < 1 || out.port > 65535)
      return refuse("its port must be a number from 1 to 65535");
    host = host.substr(0, colon);
  }
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  bool plain = std::all_of(out.path.begin(), out.path.end(), [](char c) { return c > ' ' && c < 127; });
  if (host.empty() || !plain) return refuse("it must be http://HOST[:PORT][/PATH]");
  out.host = host;
  return out;
}

std::string otlp_json(const std::vector<Span>& spans) {
  std::string out = cat("{\"resourceSpans\":[{\"resource\":{\"attributes\":[", text_attribute("service.name", "kvasir"),
                        ',', text_attribute("service.version", KVASIR_VERSION),
                        "]},\"scopeSpans\":[{\"scope\":{\"name\":\"kvasir\"},\"spans\":[");
  for (size_t i = 0; i < spans.size(); ++i) {
    if (i > 0) out += ',';
    append_span(out, spans[i]);
  }
  return out += "]}]}]}";
}

SpanExporter::SpanExporter(CollectorAddress collector) : collector_(std::move(collector)), thread_([this] { run(); }) {}

SpanExporter::~SpanExporter() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void SpanExporter::add(Span span) {
  if (span.context.trace_id.empty()) span.context.trace_id = random_hex(32);
  if (!span.context.sampled) return;
  std::lock_guard lock(mutex_);
  if (queue_.size() >= kMostQueued) {
    queue_.pop_front();
    dropped_.fetch_add(1, std::memory_order_relaxed);
  }
  queue_.push_back(std::move(span));
  if (queue_.size() == 1 || queue_.size() == kMostSent) wake_.notify_all();
}

void SpanExporter::run() {
  std::unique_lock lock(mutex_);
  seconds pause{0};
  while (true) {
    wake_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    wake_.wait_for(lock, std::max(pause, kGather),
                   [&] { return stop_ || (pause.count() == 0 && queue_.size() >= kMostSent); });
    std::vector<Span> batch;
    for (; !queue_.empty() && batch.size() < kMostSent; queue_.pop_front()) batch.push_back(std::move(queue_.front()));
    bool last = stop_;
    lock.unlock();
    Status status = post(otlp_json(batch));
    lock.lock();
    if (status.ok()) {
      sent_.fetch_add(int64_t(batch.size()), std::memory_order_relaxed);
      pause = seconds(0);
      continue;
    }
    bool again = !last && (status.code() == Code::unavailable || status.code() == Code::deadline_exceeded);
    if (pause.count() == 0)
      log_warn("spans cannot be exported",
               {{"collector", collector_.host}, {"why", status.message()}, {"again", again}});
    pause = std::clamp(pause * 2, kGather, kPatience);
    if (again && queue_.size() + batch.size() <= kMostQueued) {
      queue_.insert(queue_.begin(), std::make_move_iterator(batch.begin()), std::make_move_iterator(batch.end()));
    } else {
      dropped_.fetch_add(int64_t(batch.size()), std::memory_order_relaxed);
    }
    if (last) return;
  }
}

// Unavailable and too late are worth another attempt, other refusals are not.
Status SpanExporter::post(const std::string& body) const {
  Time until = std::chrono::steady_clock::now() + kAnswer;
  Descriptor s;
  KVASIR_TRY(connect_to(collector_, until, s));
  std::string bytes =
      cat("POST ", collector_.path, " HTTP/1.1\r\nHost: ", collector_.host, ':', collector_.port,
          "\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: ", body.size(), "\r\n\r\n", body);
  for (std::string_view rest = bytes; !rest.empty();) {
    KVASIR_TRY(ready(s.fd, POLLOUT, until));
    ssize_t n = ::send(s.fd, rest.data(), rest.size(), MSG_NOSIGNAL);
    if (n < 0 && errno != EAGAIN) return unavailable(std::strerror(errno));
    if (n > 0) rest.remove_prefix(size_t(n));
  }
  std::string answer;
  while (answer.find("\r\n") == answer.npos && answer.size() < 4096) {
    KVASIR_TRY(ready(s.fd, POLLIN, until));
    char block[1024];
    ssize_t n = ::recv(s.fd, block, sizeof block, 0);
    if (n < 0 && errno == EAGAIN) continue;
    if (n <= 0) return unavailable("it closed the connection without an answer");
    answer.append(block, size_t(n));
  }
  int code = 0;
  if (answer.size() > 12 && answer.starts_with("HTTP/1.")) std::from_chars(answer.data() + 9, answer.data() + 12, code);
  if (code >= 200 && code < 300) return {};
  bool later = code == 429 || code == 502 || code == 503 || code == 504;
  return {later ? Code::unavailable : Code::failed_precondition, cat("it answers ", code)};
}

}  // namespace kvasir::server
