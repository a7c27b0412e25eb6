// The one internal language: a Request in, a stream of Events out. Every protocol is a thin adapter over it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "core/clock.h"
#include "core/status.h"
#include "model/sampling.h"
#include "model/text/text.h"

namespace kvasir::engine {

// Beam search: no draws, but the likeliest answers as wholes. They come when all are known.
struct BeamOptions {
  enum class Early : uint8_t {
    no,    // when no beam is likelier, for its length so far, than the worst answer
    yes,   // when there are as many answers as beams
    never  // when no beam could become better than the worst answer
  };
  int32_t width = 1;         // beams; the n best answers are returned
  float length_penalty = 1;  // scores are divided by length^length_penalty: above 0 favours longer answers
  Early early = Early::no;

  // Of each row so many tokens matter: even if every kind of end is likeliest, as many beams as there are go on.
  int32_t candidates(size_t stops) const { return width * int32_t(stops > 1 ? stops + 1 : 2); }
};

// Thoughts stand between two tags, and are to have at most so many tokens.
struct ThoughtLimit {
  int64_t tokens = 0;
  std::string open;
  std::vector<std::string> ends;  // the tag that closes them, and what else may come in its place
  bool begun = false;             // the prompt ends within them
  std::vector<int32_t> closing;   // the tag that closes them, as tokens
};

struct Request {
  std::string id;               // scoped to the tenant; the engine makes one when empty
  std::string tenant;           // from the key, never from the client alone
  std::vector<int32_t> prompt;  // token ids
  std::string adapter;          // the name of one that is loaded; empty: the model as it is
  model::SamplingParams sampling;
  std::vector<int32_t> prediction;  // of the answer, by the client: the first draft
  int32_t n = 1;
  std::optional<BeamOptions> beams;  // of `sampling` then only logprobs counts
  // Instead of an answer, the prompt as a whole (max_tokens is then 0): its embedding, or where `scored` has tokens,
  // the log-probability of each as the next one.
  bool pooled = false;
  std::vector<int32_t> scored;
  bool classified = false;            // the model's classification head instead of an embedding
  std::optional<int64_t> dimensions;  // of the embedding, its first ones; unset: all
  std::optional<bool> normalize;      // to length 1; unset: as the model has it
  int32_t second_text = 0;            // of a pair: the first token of the second text; 0: there is one text
  std::optional<int64_t> max_tokens;  // unset: up to the context; 0: prompt only
  int32_t min_tokens = 0;             // no stop token before so many; stop strings hold always
  std::vector<int32_t> stop_tokens;
  std::vector<int32_t> allowed_tokens;  // only these are drawn, those that stop too; empty: all
  std::vector<std::string> stop_strings;
  std::vector<std::string> stop_regex;  // as they were said; what holds is stop_expressions
  std::shared_ptr<const text::StopExpressions> stop_expressions;
  std::vector<std::string> bad_words;  // as they were said; what holds is sampling.bad_sequences
  bool include_stop = false;           // show the stop token or string; usage counts it either way
  bool every_token = false;            // the stop token is among the tokens also where its text is not shown
  bool ignore_eos = false;
  bool skip_special = true;
  bool detokenize = true;        // false: token ids only
  int32_t prompt_logprobs = -1;  // -1: none; k: each prompt token's and the top k's
  text::GrammarSpec grammar;
  std::optional<int64_t> thinking_budget;  // as it was said; what holds is thoughts
  std::optional<ThoughtLimit> thoughts;
  std::optional<Time> deadline;
  int32_t priority = 0;  // higher runs first
  double weight = 0;     // of its tenant under the policy fair; 0: as it was
  std::string cache_salt;
  std::string trace_parent;  // W3C traceparent

  bool constrained() const { return grammar.kind != text::GrammarSpec::Kind::none || thoughts; }
};

enum class FinishReason : uint8_t { stop_token, stop_string, length, cancelled };

struct Usage {
  int64_t prompt_tokens = 0, completion_tokens = 0, cached_tokens = 0;
  int64_t drafted = 0, accepted = 0;  // tokens of drafts that were verified, and those that were right
};

struct TokenOut {
  int32_t id = 0;
  float logprob = 0;
  std::vector<model::TokenLogprob> top;
};

struct Started {
  uint64_t seed = 0;  // the one in use, so that a result can be repeated
  int64_t cached_tokens = 0;
  std::vector<TokenOut> prompt_logprobs;  // when asked for; the first token has none
};
struct Tokens {
  int32_t choice = 0;
  std::vector<TokenOut> tokens;
  std::string text;   // what became printable; may be empty
  bool last = false;  // its Finished comes right behind, with no token between
};
struct Finished {
  int32_t choice = 0;
  FinishReason reason = FinishReason::length;
  std::string stop_string;  // which, when reason is stop_string
  int32_t stop_token = -1;
  bool last = false;                       // no choice is left: nothing follows
  std::optional<float> score;              // of a beam: its log-probability over length^length_penalty
  Usage usage;                             // of the whole request so far
  std::vector<std::vector<float>> pooled;  // of a pooled request; of several that were asked as one, each's
};
struct Failed {  // always the last
  Status status;
};
// Started, then Tokens, then a Finished for each choice; a request that ends early (refused, expired,
// cancelled) may end without Started.
using Event = std::variant<Started, Tokens, Finished, Failed>;

// The reader's end of a request: a bounded queue. Destroying it cancels the request.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual const std::string& id() const = 0;
  // An event, if one is waiting. Adjacent Tokens of a choice are merged when the reader is behind.
  virtual std::optional<Event> poll() = 0;
  // Blocks; empty when the stream is over. For tests and command-line tools.
  virtual std::optional<Event> next() = 0;
  // Called whenever poll() has something after it had nothing, from an engine thread (or from here, when
  // something waits already); once more than needed at times. It must not block: it holds up every other
  // stream. It may poll, cancel and even destroy the stream; no call comes after the destructor returns.
  virtual void on_ready(std::function<void()> callback) = 0;
  virtual void cancel() = 0;
};

}  // namespace kvasir::engine
