//! Tokenizers, chat templates and grammars for kvasir, behind kvasir_text.h.

mod border;
mod calls;
mod date;
mod gguf;
mod grammar;
mod json;
mod pretok;
mod schema;
mod spm;
mod tags;
mod template;
mod tokenizer;
mod tokenizer_face;
