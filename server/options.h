// Everything `kvasir serve` can be told about its ports, callers and limits.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/config.h"
#include "engine/request.h"

namespace kvasir::server {

using Millis = std::chrono::milliseconds;

struct ServerOptions {
  // Addresses, with commas between several. An empty host is every interface; port 0 takes a free one; port -1 turns
  // the protocol off.
  std::string host = "127.0.0.1";
  int grpc_port = 50051;
  int http_port = 8000;

  std::string served_model_name;          // empty: the model's own
  bool any_model_name = false;            // a request may call it what it likes
  std::string tool_parser = "auto";       // how the model writes calls; auto: as its chat template has it
  std::string reasoning_parser = "auto";  // and thoughts
  // vLLM's switches, for all requests: log-probabilities name tokens by id, streams tell usage in each chunk, chats and
  // completions tell the times of a request.
  bool return_tokens_as_token_ids = false, enable_force_include_usage = false, enable_per_request_metrics = false;
  int64_t thinking_token_budget = -1;  // of requests that say none; -1: no limit
  std::string model_path;              // what GetModelInfo reports; not opened
  std::string model_source;            // for gateways that make prompts themselves; empty: model_path
  int32_t page_size = 16;              // what GetServerInfo and SubscribeKvEvents report
  int32_t max_running = 64;
  int64_t max_tokens_per_step = 512;  // what vllm.Control reports, and where cache events are published
  struct {
    std::string address, replay, topic;  // no address: nowhere
    uint32_t kept = 0, waiting = 0;      // events that can be asked for again, and that wait for a slow subscriber
  } kv_events;

  // Of what a request leaves unset; `sampling_json` says the same to clients who fill it in themselves.
  model::SamplingParams sampling;
  std::string sampling_json = "{}";
  bool penalties = true;  // requests may ask for them
  float said_top_p = 0;   // by the operator, for ppl's requests that leave them 0; 0: nothing was said
  int32_t said_top_k = 0;

  // Callers.
  std::string keys_file;           // empty: no keys
  bool allow_no_keys = false;      // serve other addresses than loopback without keys
  std::vector<std::string> cors;   // origins a browser page may call from; "*" is any
  std::vector<std::string> hosts;  // more names this server answers to (Host header)

  // TLS from files, read again when they change. client_ca makes it mutual.
  std::string tls_cert, tls_key, tls_client_ca;

  // Limits of what one client may send or hold.
  ByteSize max_body{8 << 20};
  ByteSize max_held{256 << 20};           // all bodies, messages and whole answers together
  int max_connections = 4096;             // of each port
  int max_streams_per_connection = 1024;  // gRPC
  int max_calls = 8192;                   // gRPC, of all connections together
  int max_choices = 128;                  // n x best_of x prompts
  int max_inputs = 2048;                  // of a call for embeddings or scores
  int max_logprobs = 20;
  int max_stop = 16;         // stop strings, and stop token ids
  int max_stop_bytes = 256;  // of one
  int max_logit_bias = 1024;
  int max_tools = 128;
  ByteSize response_store{0};    // of /v1/responses that are kept; 0: none
  Millis header_timeout{10000};  // to send a request's headers, and then its body at a fair pace
  Millis idle_timeout{75000};    // keep-alive
  Millis write_timeout{60000};   // one write that makes no progress

  int workers = 2;       // threads that parse, render templates and tokenize
  int http_threads = 2;  // threads that read and write HTTP

  bool access_log = true;     // one line a request
  std::string otlp_endpoint;  // where spans of requests go; empty: nowhere
  // POST /drain: what SIGTERM does. Not set: the endpoint answers that it is not offered.
  std::function<void()> on_drain;

  // What clients of llama-server and vLLM expect of an operator.
  bool metrics = true, slots = true;     // GET /metrics and /slots are served
  std::vector<std::string> model_alias;  // more names that requests may call the model by
  std::vector<std::string> model_tags;   // what the list of models says of it
  int64_t seed = -1;                     // of requests that bring none; -1: each draws its own

  void define(Options& options);
  // A server that would be open to other machines without keys does not start.
  Status check_open() const;
};

}  // namespace kvasir::server
