#include "server/options.h"

#include <algorithm>

#include "core/cat.h"
#include "server/listen.h"
#include "server/span_exporter.h"

namespace kvasir::server {
namespace {

bool is_loopback(const std::string& hosts) {
  const std::vector<std::string> all = addresses(hosts);
  return std::all_of(all.begin(), all.end(), [](const std::string& host) {
    return host == "localhost" || host == "::1" || host == "[::1]" || host.starts_with("127.");
  });
}

// A model has each of its names once.
Status check_names(const std::string& name, const std::vector<std::string>& aliases) {
  for (size_t i = 0; i < aliases.size(); ++i) {
    const std::string& alias = aliases[i];
    if (alias.empty()) return invalid_argument("model_alias is empty; give a name, or leave it out");
    if (alias == name)
      return invalid_argument(cat("model_alias '", alias, "' is served_model_name already; leave it out"));
    if (std::find(aliases.begin(), aliases.begin() + i, alias) != aliases.begin() + i)
      return invalid_argument(cat("model_alias '", alias, "' is given twice; leave one out"));
  }
  return {};
}

}  // namespace

Status ServerOptions::check_open() const {
  const std::vector<std::string> all = addresses(host);
  if (all.size() > 1 && std::find(all.begin(), all.end(), "") != all.end())
    return invalid_argument(cat("host '", host, "' names no address between two commas")).with_field("host");
  if (!keys_file.empty() || allow_no_keys || is_loopback(host)) return {};
  return failed_precondition(cat("host ", host.empty() ? "(every interface)" : host.c_str(),
                                 " is open to other machines and there are no keys: make one with `kvasir keys add` "
                                 "and pass --keys FILE, or say --allow-no-keys to serve anyone"));
}

void ServerOptions::define(Options& o) {
  o.section("Server");
  o.add("host", &host,
        "Address both ports listen on, or several with commas between them; empty is every interface (keys are then "
        "required)");
  o.add("grpc_port", &grpc_port, "TCP port of the gRPC services; 0 takes a free one, -1 turns them off")
      .range(-1, 65535);
  o.add("http_port", &http_port, "TCP port of the HTTP server; 0 takes a free one, -1 turns it off").range(-1, 65535);
  o.add("served_model_name", &served_model_name, "Name clients call the model by; empty is the model's own");
  o.add(
       "model_source", &model_source,
       "Where gateways that make prompts themselves (Dynamo) find tokenizer.json, config.json and the chat template: a "
       "folder of theirs, or ORG/REPO on Hugging Face; empty is the model, which must then be such a folder")
      .value_name("NAME");
  o.add("model_alias", &model_alias, "Another name that requests may call the model by");
  o.add("model_tags", &model_tags, "A word that the list of models says of the model (`tags`)");
  o.add("any_model_name", &any_model_name, "Serve requests whatever they call the model; else other names are refused");
  o.add("tool_parser", &tool_parser, "How the model writes tool calls; auto is found from its chat template")
      .one_of({"auto", "none", "hermes", "llama3", "xml", "seed", "glm", "mistral", "list", "deepseek", "pythonic",
               "gemma", "kimi", "minimax", "olmo", "functools"});
  o.add("reasoning_parser", &reasoning_parser,
        "How the model writes what it thinks before an answer; auto is found from its chat template")
      .one_of({"auto", "none", "think", "seed", "mistral", "gemma", "harmony", "kimi"});
  o.add("thinking_token_budget", &thinking_token_budget,
        "Tokens that the model may think before it is made to answer, where a request says nothing; -1 is no limit")
      .range(-1, 1000000);
  o.add("return_tokens_as_token_ids", &return_tokens_as_token_ids,
        "Log-probabilities of chats and completions name tokens as token_id:N, unless a request says "
        "return_tokens_as_token_ids: false");
  o.add("enable_force_include_usage", &enable_force_include_usage,
        "Streams of chats and completions tell usage in each chunk and at the end, whether they are asked to or not");
  o.add(
      "enable_per_request_metrics", &enable_per_request_metrics,
      "Chats and completions of one answer have metrics: how long the request waited, to its first token, and went on");
  o.add("workers", &workers, "Threads that parse requests, render chat templates and tokenize").range(1, 256);
  o.add("http_threads", &http_threads, "Threads that read and write HTTP connections").range(1, 256);
  o.add("metrics", &metrics, "Serve GET /metrics; else it answers 501");
  o.add("slots", &slots, "Serve GET /slots; else it answers 501");
  o.add("access_log", &access_log, "Write one line a request to the log");
  o.add("otlp_endpoint", &otlp_endpoint,
        "OpenTelemetry collector that spans of requests go to, as http://HOST[:4318][/v1/traces]; empty is none")
      .value_name("URL");

  o.section("Callers");
  o.add("keys", &keys_file, "File of API keys (see kvasir keys); empty serves without keys, on loopback only")
      .value_name("FILE");
  o.add("allow_no_keys", &allow_no_keys, "Serve addresses other than loopback without keys, to anyone");
  o.add("cors", &cors, "Origin whose pages may call the HTTP server; * is any, localhost any of this machine");
  o.add("hosts", &hosts, "Another name this server is reached by, allowed in the Host header without keys");
  o.add("tls_cert", &tls_cert, "Certificate chain (PEM); with --tls-key, both ports speak TLS").value_name("FILE");
  o.add("tls_key", &tls_key, "Private key of the certificate (PEM)").value_name("FILE");
  o.add("tls_client_ca", &tls_client_ca, "Certificate authority (PEM) that clients' certificates must come from")
      .value_name("FILE");
  o.check([this]() -> Status {
    if (tls_cert.empty() != tls_key.empty())
      return invalid_argument("tls_cert and tls_key go together: set both or neither");
    if (!tls_client_ca.empty() && tls_cert.empty()) return invalid_argument("tls_client_ca needs tls_cert and tls_key");
    if (!otlp_endpoint.empty()) KVASIR_TRY(parse_collector(otlp_endpoint).status());
    if (max_held.bytes < max_body.bytes)
      return invalid_argument(
          cat("max_held is ", max_held.bytes, " bytes; it must hold one body, max_body, which is ", max_body.bytes));
    KVASIR_TRY(check_names(served_model_name, model_alias));
    if (grpc_port < 0 && http_port < 0) return invalid_argument("grpc_port and http_port are both off");
    return check_open();
  });

  o.section("Limits on clients");
  o.add("max_body", &max_body, "Largest request body or message").range(1024, 1 << 30);
  o.add("max_held", &max_held, "Bytes that all requests together hold of what was sent and what is sent whole")
      .range(1 << 20, int64_t(1) << 40);
  o.add("max_connections", &max_connections, "Connections open at once, on each port; more are closed")
      .range(1, 1000000);
  o.add("max_streams_per_connection", &max_streams_per_connection,
        "gRPC calls open at once on one connection, and requests open in one call")
      .range(1, 1000000);
  o.add("max_calls", &max_calls, "gRPC calls open at once on all connections together").range(1, 1000000);
  o.add("max_choices", &max_choices, "Choices of one call: prompts x n or best_of").range(1, 4096);
  o.add("max_inputs", &max_inputs, "Texts of one call for embeddings or scores").range(1, 1000000);
  o.add("max_logprobs", &max_logprobs,
        "Alternatives for each token: logprobs, top_logprobs; with the whole vocabulary or more a request may say -1,"
        " which is all of it")
      .range(0, 1000000);
  o.add("max_stop", &max_stop, "Stop strings, and stop token ids, of a request").range(0, 1024);
  o.add("max_stop_bytes", &max_stop_bytes, "Length of one stop string").range(1, 65536);
  o.add("max_logit_bias", &max_logit_bias, "Entries of logit_bias, and of bad_words").range(0, 1000000);
  o.add("max_tools", &max_tools, "Tools of a chat request").range(0, 4096);
  o.add("response_store", &response_store,
        "Memory for answers of /v1/responses that clients ask to keep (store, previous_response_id), each for its own"
        " tenant; 0 keeps none")
      .range(0, int64_t(1) << 40);
  o.add("header_timeout", &header_timeout, "Time to send a request's headers, and then its body").at_least(0.1);
  o.add("idle_timeout", &idle_timeout, "How long a connection without a request is kept").at_least(0.1);
  o.add("write_timeout", &write_timeout, "How long a client may take nothing of what is sent to it").at_least(0.1);
}

}  // namespace kvasir::server
