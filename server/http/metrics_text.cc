#include "server/http/metrics_text.h"

#include <algorithm>

#include "core/cat.h"
#include "core/host.h"
#include "server/http/api.h"
#include "server/json_text.h"

namespace kvasir::server::http {
namespace {

using engine::Histogram;

// A family of Prometheus's text format. The alias is the name vLLM gives the same figure, so that
// dashboards and routers made for it read ours.
class Text {
 public:
  explicit Text(std::string model) : label_("model_name=" + json_string(model)) {}

  void value(const char* kind, const char* name, const char* alias, const char* help, double v) {
    family(kind, name, help);
    out_ += cat(name, ' ', v, '\n');
    if (!alias) return;
    family(kind, alias, help);
    out_ += cat(alias, '{', label_, "} ", v, '\n');
  }
  void gauge(const char* name, const char* alias, const char* help, double v) { value("gauge", name, alias, help, v); }
  void counter(const char* name, const char* alias, const char* help, int64_t v) {
    value("counter", name, alias, help, static_cast<double>(v));
  }
  void histogram(const char* name, const char* alias, const char* help, const Histogram& h) {
    buckets(name, "", help, h);
    if (alias) buckets(alias, label_, help, h);
  }
  // A name of vLLM's alone, for a figure that has its own above.
  void alias(const char* kind, const char* name, const char* help, double v) {
    family(kind, name, help);
    out_ += cat(name, '{', label_, "} ", v, '\n');
  }
  void family(const char* kind, const char* name, const char* help) {
    out_ += cat("# HELP ", name, ' ', help, "\n# TYPE ", name, ' ', kind, '\n');
  }
  void row(const char* name, const std::string& labels, int64_t v) { out_ += cat(name, '{', labels, "} ", v, '\n'); }
  std::string take() { return std::move(out_); }

 private:
  void buckets(const char* name, const std::string& label, const char* help, const Histogram& h) {
    family("histogram", name, help);
    std::string before = label.empty() ? "" : label + ",", alone = label.empty() ? "" : "{" + label + "}";
    int64_t below = 0;
    for (size_t i = 0; i < h.bounds.size(); ++i) {
      below += h.buckets[i];
      out_ += cat(name, "_bucket{", before, "le=\"", h.bounds[i], "\"} ", below, '\n');
    }
    out_ += cat(name, "_bucket{", before, "le=\"+Inf\"} ", h.count, '\n');
    out_ += cat(name, "_sum", alone, ' ', h.sum, '\n', name, "_count", alone, ' ', h.count, '\n');
  }

  std::string label_, out_;
};

double used_share(const engine::Stats& s) {
  if (s.pages_total == 0) return 0;
  return static_cast<double>(s.pages_total - s.pages_free - s.pages_cached) / static_cast<double>(s.pages_total);
}

double hit_rate(const engine::Stats& s) {
  return s.prompt_tokens == 0 ? 0 : static_cast<double>(s.cached_tokens) / static_cast<double>(s.prompt_tokens);
}

// As vLLM says it: who is in use, as labels; the value is the time.
void add_adapters(Text& t, const Services& services) {
  const std::vector<engine::AdapterInfo> all = services.engine().adapters();
  if (all.empty()) return;
  std::string running, waiting;
  int64_t bytes = 0;
  for (const engine::AdapterInfo& a : all) {
    bytes += a.bytes;
    if (a.running > 0) running += cat(running.empty() ? "" : ",", a.name);
    if (a.waiting > 0) waiting += cat(waiting.empty() ? "" : ",", a.name);
  }
  t.family("gauge", "vllm:lora_requests_info", "Adapters whose requests run or wait, as labels; the value is the time");
  t.row("vllm:lora_requests_info",
        cat("max_lora=\"", services.options().max_running, "\",running_lora_adapters=", json_string(running),
            ",waiting_lora_adapters=", json_string(waiting)),
        unix_seconds());
  t.gauge("kvasir_adapters", nullptr, "Adapters that requests may name", double(all.size()));
  t.gauge("kvasir_adapter_bytes", nullptr, "Memory of these", double(bytes));
}

// By who made them: the text before (lookup), the client (prediction), the grammar, the draft model or head.
void add_drafts(Text& t, const engine::Stats& s) {
  const auto label = [](size_t source) { return cat("source=\"", engine::kDraftSourceNames[source], '"'); };
  t.family("counter", "kvasir_drafted_tokens_total", "Draft tokens that were verified, by where the draft came from");
  for (size_t i = 0; i < s.drafts.size(); ++i) t.row("kvasir_drafted_tokens_total", label(i), s.drafts[i].drafted);
  t.family("counter", "kvasir_drafted_tokens_accepted_total", "Those of them that were right");
  for (size_t i = 0; i < s.drafts.size(); ++i)
    t.row("kvasir_drafted_tokens_accepted_total", label(i), s.drafts[i].accepted);
  if (s.draft_model.name.empty()) return;
  t.gauge("kvasir_draft_model_up", nullptr, "0 when the draft model has failed and drafts no more",
          s.draft_model.fault.empty());
  t.gauge("kvasir_draft_model_pages_total", nullptr, "Pages of the draft model's cache",
          double(s.draft_model.pages_total));
  t.gauge("kvasir_draft_model_pages_free", nullptr, "Of them, pages nobody uses", double(s.draft_model.pages_free));
  t.value("counter", "kvasir_draft_model_seconds_total", nullptr, "Time that the draft model's steps took",
          s.draft_model.seconds);
}

int64_t refused_for_load(const Services& services) {
  int64_t all = 0;
  for (const Metrics::Outcome& r : services.metrics().rows())
    if (r.code == Code::resource_exhausted) all += r.requests;
  return all;
}

// The same figures by llama-server's names, of which a dashboard made for it may ask; times are sums over requests.
void add_llama(Text& t, const engine::Stats& s) {
  auto value = [&](const char* kind, const char* name, const char* help, double v) {
    t.value(kind, name, nullptr, help, v);
  };
  auto over = [](double a, double b) { return b > 0 ? a / b : 0; };
  const double computed = double(s.prompt_tokens - s.cached_tokens), made = double(s.output_tokens);
  value("counter", "llamacpp:prompt_tokens_total", "Prompt tokens computed", computed);
  value("counter", "llamacpp:prompt_tokens_cached_total", "Prompt tokens found in the cache", double(s.cached_tokens));
  value("counter", "llamacpp:prompt_seconds_total", "Time that prompts took", s.prefill.sum);
  value("counter", "llamacpp:tokens_predicted_total", "Tokens generated", made);
  value("counter", "llamacpp:tokens_predicted_seconds_total", "Time that answers took", s.decode.sum);
  value("counter", "llamacpp:n_decode_total", "Steps of the engine", double(s.steps));
  value("counter", "llamacpp:n_tokens_max", "Tokens of the longest sequence, prompt and answer", double(s.longest));
  value("counter", "llamacpp:spec_decode_num_drafts_total", "Drafts that were verified", double(s.draft_runs));
  value("counter", "llamacpp:spec_decode_num_draft_tokens_total", "Draft tokens that were verified",
        double(s.all_drafts().drafted));
  value("counter", "llamacpp:spec_decode_num_accepted_tokens_total", "Draft tokens that were right",
        double(s.all_drafts().accepted));
  value("gauge", "llamacpp:prompt_tokens_seconds", "Prompt tokens a second", over(computed, s.prefill.sum));
  value("gauge", "llamacpp:predicted_tokens_seconds", "Generated tokens a second", over(made, s.decode.sum));
  value("gauge", "llamacpp:requests_processing", "Requests in the batch", double(s.running));
  value("gauge", "llamacpp:requests_deferred", "Requests that wait to be run", double(s.waiting));
  value("gauge", "llamacpp:n_busy_slots_per_decode", "Sequences in a step",
        over(s.batch_size.sum, double(s.batch_size.count)));
}

// Of a model that is split; what each rank has of it.
void add_ranks(Text& t, const Services& services) {
  const std::vector<model::RankInfo> ranks = services.engine().stats().ranks;
  if (ranks.empty()) return;
  t.family("gauge", "kvasir_rank_info", "The ranks that compute each step together, as labels");
  for (size_t i = 0; i < ranks.size(); ++i)
    t.row("kvasir_rank_info",
          cat("rank=\"", i, "\",device=", json_string(ranks[i].device), ",heads=\"", ranks[i].heads, "\",kv_heads=\"",
              ranks[i].kv_heads, '"'),
          1);
  t.family("gauge", "kvasir_rank_weight_bytes", "Weights of a rank");
  for (size_t i = 0; i < ranks.size(); ++i)
    t.row("kvasir_rank_weight_bytes", cat("rank=\"", i, '"'), double(ranks[i].weight_bytes));
  t.family("gauge", "kvasir_rank_cache_bytes_per_token", "Bytes of a rank's cache that a token takes");
  for (size_t i = 0; i < ranks.size(); ++i)
    t.row("kvasir_rank_cache_bytes_per_token", cat("rank=\"", i, '"'), double(ranks[i].kv_bytes_per_token));
}

void add_load(Text& t, const Services& services, const engine::Stats& s) {
  Health health = services.health();
  t.gauge("kvasir_ready", nullptr, "1 when requests are served", health.ready);
  t.gauge("kvasir_live", nullptr, "0 when work is pending and no step ends", health.live);
  t.gauge("kvasir_requests_running", "vllm:num_requests_running", "Requests in the batch", s.running);
  t.gauge("kvasir_requests_waiting", "vllm:num_requests_waiting", "Requests that wait to be run", s.waiting);
  t.gauge("kvasir_requests_paused", nullptr, "Requests whose reader is behind", s.paused);
}

void add_cache(Text& t, const Services& services, const engine::Stats& s) {
  t.gauge("kvasir_cache_pages_total", nullptr, "Pages of the KV cache", s.pages_total);
  t.gauge("kvasir_cache_pages_free", nullptr, "Pages nobody uses", s.pages_free);
  t.gauge("kvasir_cache_pages_cached", nullptr, "Pages kept for prefixes that may come again", s.pages_cached);
  t.gauge("kvasir_cache_used_ratio", "vllm:kv_cache_usage_perc", "Share of the pages that running requests hold",
          used_share(s));
  t.alias("gauge", "vllm:gpu_cache_usage_perc", "The same, by its older name", used_share(s));
  const int64_t cache_tokens = s.pages_total * services.options().page_size;
  t.family("gauge", "vllm:cache_config_info",
           "Size of the cache, as labels; the concurrency is how many requests of the whole context it holds");
  t.row("vllm:cache_config_info",
        cat("block_size=\"", services.options().page_size, "\",num_gpu_blocks=\"", s.pages_total,
            "\",kv_cache_size_tokens=\"", cache_tokens, "\",kv_cache_max_concurrency=\"",
            double(cache_tokens) / double(services.engine().info().context_length),
            "\",cache_dtype=", json_string(s.kv_type)),
        1);
  t.family("gauge", "kvasir_attention_info", "What attention's scores are made of, as a label");
  t.row("kvasir_attention_info", cat("dtype=", json_string(s.attention_type)), 1);
  t.gauge("kvasir_cache_bytes_per_token", nullptr, "Bytes of the cache that a token takes, scales included",
          s.kv_bytes_per_token);
  t.gauge("kvasir_prefix_hit_ratio", nullptr, "Share of prompt tokens found in the prefix cache, since the start",
          hit_rate(s));
}

void add_tokens(Text& t, const engine::Stats& s) {
  t.counter("kvasir_prompt_tokens_total", "vllm:prompt_tokens_total", "Prompt tokens of finished prefills",
            s.prompt_tokens);
  t.counter("kvasir_cached_tokens_total", "vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache",
            s.cached_tokens);
  t.alias("counter", "vllm:prefix_cache_queries_total", "Prompt tokens looked for in the prefix cache",
          static_cast<double>(s.prompt_tokens));
  t.counter("kvasir_output_tokens_total", "vllm:generation_tokens_total", "Tokens generated", s.output_tokens);
  t.counter("kvasir_draft_tokens_total", "vllm:spec_decode_num_draft_tokens_total", "Draft tokens that were verified",
            s.all_drafts().drafted);
  t.counter("kvasir_draft_tokens_accepted_total", "vllm:spec_decode_num_accepted_tokens_total",
            "Draft tokens that were right", s.all_drafts().accepted);
  add_drafts(t, s);
}

void add_requests(Text& t, const engine::Stats& s) {
  t.counter("kvasir_requests_total", nullptr, "Requests submitted to the engine", s.requests);
  t.counter("kvasir_requests_finished_total", nullptr, "Requests that ended well", s.finished);
  t.counter("kvasir_requests_failed_total", nullptr, "Requests that ended with an error", s.failed);
  t.counter("kvasir_requests_cancelled_total", nullptr, "Requests their clients gave up", s.cancelled);
  t.counter("kvasir_preemptions_total", "vllm:num_preemptions_total", "Requests that lost their pages for a while",
            s.preemptions);
  t.counter("kvasir_steps_total", nullptr, "Steps of the engine", s.steps);
  t.counter(
      "kvasir_steps_cut_total", nullptr,
      "Steps that took up fewer prompt tokens, so that decodes beside them are not held up longer than max_step_ms",
      s.steps_cut);
}

void add_experts(Text& t, const engine::Stats& s) {
  t.counter("kvasir_expert_tokens_total", nullptr,
            "Tokens by expert that they were sent to, of all layers; 0 without experts, and on a GPU",
            s.experts.tokens);
  t.counter("kvasir_expert_reads_total", nullptr, "Experts whose weights a step has read, of all layers",
            s.experts.reads);
  t.gauge("kvasir_expert_imbalance", nullptr,
          "Tokens of the most chosen expert over the mean of its layer, lately: the layers on average",
          s.experts.usual);
  t.gauge("kvasir_expert_imbalance_worst", nullptr, "The same of the layer where it is greatest", s.experts.worst);
}

void add_calls(Text& t, const Services& services, const engine::Stats& s) {
  t.family("counter", "kvasir_errors_total", "Requests that failed, by cause");
  for (const auto& [cause, count] : s.errors) t.row("kvasir_errors_total", "cause=" + json_string(cause), count);
  t.family("counter", "kvasir_calls_total", "Generation calls, by protocol and outcome");
  for (const Metrics::Outcome& r : services.metrics().rows())
    t.row("kvasir_calls_total", cat("protocol=", json_string(r.protocol), ",code=\"", code_name(r.code), '"'),
          r.requests);
  t.family("counter", "vllm:request_success_total", "Choices that ended well, by how");
  for (size_t i = 0; i < Metrics::kEndings.size(); ++i)
    t.row("vllm:request_success_total",
          cat("model_name=", json_string(services.model_name()), ",finished_reason=\"", Metrics::kEndings[i], '"'),
          services.metrics().ended(i));
  t.alias("counter", "vllm:admission_rejections_total", "Generation calls refused because of load or a limit",
          static_cast<double>(refused_for_load(services)));
  t.family("gauge", "vllm:num_requests_waiting_by_reason", "Requests that wait to be run, by why");
  t.row("vllm:num_requests_waiting_by_reason",
        cat("model_name=", json_string(services.model_name()), ",reason=\"capacity\""), s.waiting);
}

void add_times(Text& t, const Services& services, const engine::Stats& s) {
  t.histogram("kvasir_time_to_first_token_seconds", "vllm:time_to_first_token_seconds",
              "From submission to the first token", s.first_token);
  t.histogram("kvasir_inter_token_seconds", "vllm:inter_token_latency_seconds", "Between tokens of one request",
              s.between_tokens);
  t.histogram("kvasir_prefill_seconds", "vllm:request_prefill_time_seconds", "From the first step to the first token",
              s.prefill);
  t.histogram("kvasir_decode_seconds", "vllm:request_decode_time_seconds", "From the first token to the end", s.decode);
  t.histogram("kvasir_request_seconds", "vllm:e2e_request_latency_seconds", "From submission to the end", s.whole);
  t.histogram("kvasir_queue_seconds", "vllm:request_queue_time_seconds", "From submission to the first step", s.queued);
  t.histogram("kvasir_step_seconds", nullptr, "One step", s.step_time);
  t.histogram("kvasir_step_sequences", nullptr, "Sequences in a step", s.batch_size);
  t.histogram("kvasir_step_tokens", nullptr, "Tokens in a step", s.step_tokens);
  t.histogram("kvasir_handled_tokens", "vllm:iteration_tokens_total",
              "Tokens that a step began to read and that it drew: whole prompts, cached or not, and answers",
              s.handled_tokens);
  t.histogram("kvasir_prompt_length_tokens", "vllm:request_prompt_tokens", "Prompt tokens of a request",
              s.prompt_length);
  t.histogram("kvasir_output_length_tokens", "vllm:request_generation_tokens", "Output tokens of a request",
              s.output_length);
  t.histogram("kvasir_request_preemptions", "vllm:request_num_preemptions",
              "How often a request lost its pages for a while, of those that ended", s.preempted);
  const Metrics::Requests of = services.metrics().requests();
  t.histogram("kvasir_inference_seconds", "vllm:request_inference_time_seconds",
              "From the first step to the end of the answer", of.inference);
  t.histogram("kvasir_asked_choices", "vllm:request_params_n", "Choices that a request asked for", of.choices);
  t.histogram("kvasir_asked_tokens", "vllm:request_params_max_tokens",
              "The longest answer that a request asked for, where it said so", of.max_tokens);
}

}  // namespace

std::string metrics_text(const Services& services) {
  const engine::Stats s = services.engine().stats();
  Text t(services.model_name());
  add_load(t, services, s);
  add_cache(t, services, s);
  add_tokens(t, s);
  add_requests(t, s);
  add_experts(t, s);
  add_calls(t, services, s);
  add_llama(t, s);
  add_adapters(t, services);
  add_ranks(t, services);
  if (const SpanExporter* spans = services.spans()) {
    t.counter("kvasir_spans_sent_total", nullptr, "Spans the collector took", spans->sent());
    t.counter("kvasir_spans_dropped_total", nullptr, "Spans the collector did not take", spans->dropped());
  }
  t.counter("kvasir_auth_failures_total", nullptr, "Calls without a valid key", services.metrics().auth_failures());
  add_times(t, services, s);
  t.gauge("process_resident_memory_bytes", nullptr, "Resident memory", resident_bytes());
  return t.take();
}

std::string stats_json(const Services& services) {
  constexpr size_t kShown = 60;
  std::vector<engine::StepSample> recent = services.engine().recent_steps();
  std::string steps;  // of each: sequences that decode, those whose prompts are read, tokens
  for (size_t i = recent.size() - std::min(recent.size(), kShown); i < recent.size(); ++i)
    steps += cat(steps.empty() ? "[" : ",[", recent[i].decodes, ',', recent[i].prefills, ',', recent[i].tokens, ']');
  engine::Stats s = services.engine().stats();
  auto times = [](const Histogram& h) {
    return cat("{\"count\":", h.count, ",\"p50\":", h.percentile(0.5), ",\"p95\":", h.percentile(0.95),
               ",\"p99\":", h.percentile(0.99), '}');
  };
  return cat("{\"state\":\"", state_name(services.health().state), "\",\"message\":", json_string(s.message),
             ",\"model\":", json_string(services.model_name()), ",\"running\":", s.running, ",\"waiting\":", s.waiting,
             ",\"paused\":", s.paused, ",\"pages_total\":", s.pages_total, ",\"pages_free\":", s.pages_free,
             ",\"pages_cached\":", s.pages_cached, ",\"prompt_tokens\":", s.prompt_tokens,
             ",\"cached_tokens\":", s.cached_tokens, ",\"output_tokens\":", s.output_tokens,
             ",\"draft_tokens\":", s.all_drafts().drafted, ",\"draft_tokens_accepted\":", s.all_drafts().accepted,
             ",\"tokens_per_second\":", s.tokens_per_second, ",\"steps\":", s.steps, ",\"finished\":", s.finished,
             ",\"failed\":", s.failed, ",\"cancelled\":", s.cancelled, ",\"batch_size\":", times(s.batch_size),
             ",\"step_tokens\":", times(s.step_tokens), ",\"step_seconds\":", times(s.step_time),
             ",\"ttft_seconds\":", times(s.first_token), ",\"itl_seconds\":", times(s.between_tokens),
             ",\"last_steps\":[", steps, "]}");
}

std::string load_header(std::string_view format, const Services& services) {
  auto is = [&](std::string_view name) {
    return std::equal(format.begin(), format.end(), name.begin(), name.end(),
                      [](char a, char b) { return (a >= 'a' && a <= 'z' ? char(a - 'a' + 'A') : a) == b; });
  };
  const bool text = is("TEXT");
  if (!text && !is("JSON")) return {};
  const engine::Stats s = services.engine().stats();
  if (text)
    return cat("TEXT named_metrics.kv_cache_usage_perc=", used_share(s),
               ", named_metrics.num_requests_running=", s.running, ", named_metrics.num_requests_waiting=", s.waiting);
  return cat("JSON {\"named_metrics\":{\"kv_cache_usage_perc\":", used_share(s),
             ",\"num_requests_running\":", s.running, ",\"num_requests_waiting\":", s.waiting, "}}");
}

}  // namespace kvasir::server::http
