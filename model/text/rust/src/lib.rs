//! Tokenizers, chat templates and grammars for kvasir, behind kvasir_text.h.

#[global_allocator]
static ALLOCATOR: meter::Counting = meter::Counting;

mod border;
mod call_forms;
mod call_values;
mod calls;
mod chars;
mod charsmap;
mod cuts;
mod date;
mod direct;
mod gbnf;
mod gbnf_lark;
mod gbnf_readings;
mod gguf;
mod grammar;
mod json;
mod merges;
mod normal;
mod pretok;
mod schema;
mod spm;
mod stops;
mod tags;
mod template;
mod template_bounds;
mod tokenizer;
mod tokenizer_face;
mod unigrams;
mod watch;
mod words;
