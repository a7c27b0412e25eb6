// The one border between kvasir and its Rust library. Every call returns a status number of
// core/status.h (0 is ok); on failure `error` holds the message. A Rust panic is caught and comes back as
// 13 (internal). Strings are UTF-8 with a length; nothing here ends with a zero.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const char* data;
  size_t size;
} kvt_str;

// Bytes that Rust made; give them back with kvt_buf_free.
typedef struct {
  uint8_t* data;
  size_t size;
  size_t capacity;
} kvt_buf;
void kvt_buf_free(kvt_buf buf);

// Whether what is asked for is wanted no longer. Called on any thread, by grammars every millisecond or so.
typedef uint8_t (*kvt_stopped)(void* of);

typedef struct kvt_tokenizer kvt_tokenizer;
typedef struct kvt_template kvt_template;
typedef struct kvt_grammar kvt_grammar;
typedef struct kvt_matcher kvt_matcher;
typedef struct kvt_stops kvt_stops;
typedef struct kvt_scan kvt_scan;

typedef struct {
  kvt_str model, pre, chat_template;
  const kvt_str* tokens;
  const float* scores;   // n_scores is 0 or n_tokens
  const int32_t* types;  // n_types is 0 or n_tokens
  const kvt_str* merges;
  size_t n_tokens, n_scores, n_types, n_merges;
  int32_t bos, eos, unk, eot, pad;
  uint8_t add_bos, add_eos, add_space_prefix, remove_extra_spaces;
  const uint8_t* charsmap;
  size_t n_charsmap;
} kvt_gguf_vocab;

// A view into the tokenizer; lives as long as it does. Token i's bytes are bytes[offsets[i], offsets[i+1]).
typedef struct {
  int32_t vocab_size, bos;
  const int32_t* end_of_generation;
  size_t n_end_of_generation;
  kvt_str chat_template;
  const char* bytes;  // what a token adds to a text
  const uint32_t* bytes_offsets;
  const char* text;  // a token as it stands in the vocabulary
  const uint32_t* text_offsets;
  const uint8_t* flags;  // 1 special, 2 never to be generated
  uint8_t strips_leading_space;
  uint8_t goes_directly;  // texts are encoded by rust/src/direct.rs, not by the library
} kvt_tokenizer_view;

int kvt_tokenizer_from_json(kvt_str json, kvt_str config_json, kvt_tokenizer** out, kvt_buf* error);
int kvt_tokenizer_from_gguf(const kvt_gguf_vocab* vocab, kvt_tokenizer** out, kvt_buf* error);
void kvt_tokenizer_free(kvt_tokenizer* t);
void kvt_tokenizer_look(const kvt_tokenizer* t, kvt_tokenizer_view* out);
// `out`: the tokenizer as a tokenizer.json, or the error's message.
int kvt_tokenizer_json(const kvt_tokenizer* t, kvt_buf* out);
int32_t kvt_token_id(const kvt_tokenizer* t, kvt_str text);  // -1: none
// Where a text may be cut, at most some `piece` bytes of it are encoded at a time. With more than `most` tokens it ends
// early, and so it does when it is stopped (1, cancelled).
typedef struct {
  size_t piece, most;
  kvt_stopped stopped;  // called before each piece; may be null
  void* stopped_of;
  uint8_t by_library;  // nothing by the direct way (direct.rs), which is to make the same ids
} kvt_encode_limits;
// `out`: int32 ids, or the error's message.
int kvt_encode(const kvt_tokenizer* t, kvt_str text, uint8_t add_bos, uint8_t parse_special,
               const kvt_encode_limits* limits, kvt_buf* out);

int kvt_template_compile(kvt_str source, kvt_str bos_text, kvt_str eos_text, kvt_template** out, kvt_buf* error);
void kvt_template_free(kvt_template* t);
int kvt_template_render(const kvt_template* t, kvt_str messages_json, kvt_str tools_json, uint8_t add_generation_prompt,
                        kvt_str extra_json, kvt_buf* out);

// kind: 1 JSON object, 2 JSON schema, 3 regex, 4 Lark, 5 choice (`choices`), 6 calls of tools. One kvt_grammar is
// shared by threads; a matcher belongs to one thread at a time. All of them end within limits of time and memory.
int kvt_grammar_new(const kvt_tokenizer* t, kvt_grammar** out, kvt_buf* error);
void kvt_grammar_free(kvt_grammar* g);
int kvt_grammar_compile(const kvt_grammar* g, int kind, kvt_str text, const kvt_str* choices, size_t n_choices,
                        kvt_stopped stopped, void* stopped_of, kvt_matcher** out, kvt_buf* error);
size_t kvt_matcher_bytes(const kvt_matcher* m);
void kvt_matcher_free(kvt_matcher* m);
int kvt_matcher_clone(const kvt_matcher* m, kvt_matcher** out, kvt_buf* error);
int kvt_matcher_mask(kvt_matcher* m, uint32_t* bits, size_t n_words, kvt_buf* error);
int kvt_matcher_consume(kvt_matcher* m, int32_t token, kvt_buf* error);
// Bytes that come next whatever is drawn; a special token is 0xFF and its id in brackets.
int kvt_matcher_forced(kvt_matcher* m, kvt_buf* out, kvt_buf* error);
uint8_t kvt_matcher_finished(const kvt_matcher* m);

// Regular expressions that end a text. One kvt_stops is shared by threads; a scan is of one text, whose pieces it is
// told in order: `found` is 1 where one matches, `end` bytes of the piece are then the text up to its end.
int kvt_stops_compile(const kvt_str* expressions, size_t n, kvt_stops** out, kvt_buf* error);
void kvt_stops_free(kvt_stops* s);
int kvt_scan_new(const kvt_stops* s, kvt_scan** out, kvt_buf* error);
void kvt_scan_free(kvt_scan* s);
int kvt_scan_push(kvt_scan* s, kvt_str more, uint8_t* found, size_t* end, size_t* which, kvt_buf* error);

#ifdef __cplusplus
}
#endif
