//! Grammars as token masks. A grammar is compiled with limits, so that no schema or regex of a client's can
//! hold a thread or fill memory; $ref is resolved inside the schema only.

use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{json, Value};

use crate::border::{give, guard, invalid, slice, take_back, Buf, Error, Result, Str, FAILED_PRECONDITION, INTERNAL};
use crate::calls;
use crate::schema;
use crate::tags;
use crate::tokenizer::{Tokenizer, NEVER_GENERATED, SPECIAL};

const MAX_TEXT: usize = 256 << 10;
const MAX_CHOICES: usize = 4096;
// The library follows rules, brackets and references by recursion: each costs some 4 KB of stack, and what is wrong
// with the last of a chain of rules takes the square of its length to say (2,000: some 4 s).
const MAX_LEVELS: usize = 2_000;
const MAX_REFERENCES: usize = 4_000;
const STACK: usize = 128 << 20; // address space; only what is used becomes memory
const TRIAL_STEPS: usize = 6;
const MAX_TOKEN_BYTES: usize = 900; // the trie's depth is bounded

pub struct Grammar {
    factory: ParserFactory,
    eos: Vec<u32>,
    specials: Vec<(u32, String)>, // that do not end an answer
}

pub struct OneMatcher {
    matcher: Matcher,
    eos: Vec<u32>,
}

fn token_words(t: &Tokenizer) -> Vec<Vec<u8>> {
    (0..t.bytes.len())
        .map(|i| {
            let bytes = t.bytes.get(i);
            if t.flags[i] & SPECIAL != 0 {
                let mut word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
                word.extend_from_slice(bytes);
                word
            } else if t.flags[i] & NEVER_GENERATED != 0
                || bytes.len() > MAX_TOKEN_BYTES
                || bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER)
            {
                Vec::new()
            } else {
                bytes.to_vec()
            }
        })
        .collect()
}

impl Grammar {
    fn new(t: &Tokenizer) -> Result<Grammar> {
        let eos: Vec<u32> = t.end_of_generation.iter().map(|&id| id as u32).collect();
        if eos.is_empty() {
            return Err(Error {
                code: FAILED_PRECONDITION,
                message: "the tokenizer names no end-of-text token, so a grammar could never end".into(),
            });
        }
        let words = token_words(t);
        let info = TokRxInfo::new(words.len() as u32, eos[0]);
        let trie = TokTrie::from(&info, &words).with_eos_tokens(&eos);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices())
            .map_err(|e| Error { code: INTERNAL, message: format!("grammars: {e}") })?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.verbose_errors = false;
        limits.max_items_in_row = 4_000;
        limits.max_lexer_states = 50_000;
        limits.max_grammar_size = 250_000;
        limits.initial_lexer_fuel = 1_000_000;
        let specials = (0..t.bytes.len() as u32)
            .filter(|id| t.flags[*id as usize] & SPECIAL != 0 && !eos.contains(id))
            .map(|id| (id, String::from_utf8_lossy(t.bytes.get(id as usize)).into_owned()))
            .collect();
        Ok(Grammar { factory, eos, specials })
    }

    fn compile(&self, kind: i32, text: &str, choices: &[&str]) -> Result<OneMatcher> {
        std::thread::scope(|scope| {
            let compiling = std::thread::Builder::new()
                .stack_size(STACK)
                .spawn_scoped(scope, || self.compile_here(kind, text, choices))
                .map_err(|e| Error { code: INTERNAL, message: format!("no thread to compile the grammar: {e}") })?;
            compiling.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn compile_here(&self, kind: i32, text: &str, choices: &[&str]) -> Result<OneMatcher> {
        let size = text.len() + choices.iter().map(|c| c.len()).sum::<usize>();
        if size > MAX_TEXT {
            return Err(invalid(format!("the grammar has {size} bytes; at most {MAX_TEXT}")));
        }
        // Counted wherever they stand, in strings too: what a grammar's text means is for the library to say.
        let (levels, most, what) = match kind {
            2 => (text.matches("$ref").count(), MAX_REFERENCES, "references ($ref)"),
            4 => {
                let levels = text.chars().filter(|c| ":([{~".contains(*c)).count();
                (levels, MAX_LEVELS, "rules and brackets (: ( [ { ~)")
            }
            _ => (0, 0, ""),
        };
        if levels > most {
            return Err(invalid(format!("the grammar has {levels} {what}; at most {most}")));
        }
        let grammar = match kind {
            1 => TopLevelGrammar::from_json_schema(schema::prepare(json!({"type": "object"}))?),
            2 => {
                let schema: Value =
                    serde_json::from_str(text).map_err(|e| invalid(format!("the JSON schema is not JSON: {e}")))?;
                TopLevelGrammar::from_json_schema(schema::prepare(schema)?)
            }
            3 => TopLevelGrammar::from_regex(text),
            4 => TopLevelGrammar::from_lark(text.to_string()),
            5 => TopLevelGrammar::from_lark(choice_grammar(choices)?),
            6 => {
                let specials: Vec<(u32, &str)> = self.specials.iter().map(|(id, text)| (*id, text.as_str())).collect();
                TopLevelGrammar::from_lark(calls::lark(text, &specials)?)
            }
            7 => TopLevelGrammar::from_lark(tags::lark(text)?),
            other => return Err(invalid(format!("grammar kind {other} does not exist"))),
        };
        let matcher = Matcher::new(self.factory.create_parser(grammar));
        if let Some(error) = matcher.get_error() {
            let hint = if kind == 4 && text.contains("::=") {
                "its rules are written with ::= (GBNF, EBNF), and here they are Lark (start: \"a\" other): "
            } else {
                ""
            };
            return Err(invalid(format!("the grammar cannot be used: {hint}{}", shorten(&error))));
        }
        let matcher = OneMatcher { matcher, eos: self.eos.clone() };
        self.try_out(&mut matcher.copy())?;
        Ok(matcher)
    }

    /// A grammar too ambiguous for the limits shows it in its first steps: better here than in a batch.
    fn try_out(&self, matcher: &mut OneMatcher) -> Result<()> {
        let mut bits = vec![0u32; self.factory.tok_env().tok_trie().vocab_size().div_ceil(32)];
        for _ in 0..TRIAL_STEPS {
            let refused = |e: Error| invalid(format!("the grammar cannot be used: {}", shorten(&e.message)));
            matcher.mask(&mut bits).map_err(refused)?;
            let Some(word) = bits.iter().position(|&w| w != 0) else {
                return Err(invalid("the grammar cannot be used: no token of this model can begin its text"));
            };
            let token = (word * 32) as u32 + bits[word].trailing_zeros();
            if matcher.matcher.is_stopped() {
                break;
            }
            matcher.consume(token).map_err(refused)?;
        }
        Ok(())
    }
}

/// Tokens that a state of the grammar takes or refuses together, so that it need not walk through them: white space, and
/// pieces of JSON strings by length. The library's own have 10 and 30 characters; what is left of a short string's
/// maxLength is mostly less, and then each mask walks the whole vocabulary.
fn slices() -> Vec<String> {
    const TEXT: &str = r#"[^"\\\x00-\x1F\x7F]"#;
    let mut out = vec![r"[\x20\x0A\x0D\x09]+".to_string()];
    out.extend([1, 2, 3, 4, 5, 6, 8, 10, 15, 30].map(|most| format!("{TEXT}{{1,{most}}}")));
    out.push(format!("{TEXT}+"));
    out
}

/// The library quotes the whole grammar back; a client knows what it sent.
fn shorten(error: &str) -> String {
    let error = error.replace("\n<non-verbose/>", "");
    match error.char_indices().nth(400) {
        Some((at, _)) => format!("{} ...", &error[..at]),
        None => error,
    }
}

fn choice_grammar(choices: &[&str]) -> Result<String> {
    if choices.is_empty() || choices.len() > MAX_CHOICES {
        return Err(invalid(format!("choice has {} entries; it must have 1 to {MAX_CHOICES}", choices.len())));
    }
    if choices.iter().any(|c| c.is_empty()) {
        return Err(invalid("choice has an empty entry; each must be a text"));
    }
    let quoted: Vec<String> = choices.iter().map(|c| Value::String(c.to_string()).to_string()).collect();
    Ok(format!("start: {}\n", quoted.join(" | ")))
}

impl OneMatcher {
    /// Deep: a shallow clone shares its lexer behind a lock, and sequences are masked on many threads.
    fn copy(&self) -> OneMatcher {
        OneMatcher { matcher: self.matcher.deep_clone(), eos: self.eos.clone() }
    }

    fn mask(&mut self, bits: &mut [u32]) -> Result<()> {
        let mask = self
            .matcher
            .compute_mask_or_eos()
            .map_err(|e| Error { code: INTERNAL, message: format!("the grammar stopped: {e}") })?;
        let words = mask.as_slice();
        let n = words.len().min(bits.len());
        bits[..n].copy_from_slice(&words[..n]);
        bits[n..].fill(0);
        Ok(())
    }

    fn consume(&mut self, token: u32) -> Result<()> {
        if self.matcher.is_stopped() && !self.matcher.is_error() {
            if self.eos.contains(&token) {
                return Ok(());
            }
            return Err(invalid(format!("token {token} follows the end of the grammar's text")));
        }
        // A refused token leaves the matcher usable.
        match self.matcher.try_consume_tokens(&[token]) {
            Ok(1) => Ok(()),
            Ok(_) => Err(invalid(format!("token {token} is not one the grammar allows here"))),
            Err(e) => Err(Error { code: INTERNAL, message: format!("the grammar stopped: {e}") }),
        }
    }
}

#[no_mangle]
pub unsafe extern "C" fn kvt_grammar_new(t: *const Tokenizer, out: *mut *mut Grammar, error: *mut Buf) -> i32 {
    guard(error, || {
        give(out, Grammar::new(&*t)?);
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn kvt_grammar_free(g: *mut Grammar) {
    take_back(g)
}

#[no_mangle]
pub unsafe extern "C" fn kvt_grammar_compile(
    g: *const Grammar,
    kind: i32,
    text: Str,
    choices: *const Str,
    n_choices: usize,
    out: *mut *mut OneMatcher,
    error: *mut Buf,
) -> i32 {
    guard(error, || {
        let mut texts = Vec::with_capacity(n_choices);
        for choice in slice(choices, n_choices) {
            texts.push(choice.text("choice")?);
        }
        give(out, (*g).compile(kind, text.text("the grammar")?, &texts)?);
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn kvt_matcher_free(m: *mut OneMatcher) {
    take_back(m)
}

#[no_mangle]
pub unsafe extern "C" fn kvt_matcher_clone(m: *const OneMatcher, out: *mut *mut OneMatcher, error: *mut Buf) -> i32 {
    guard(error, || {
        give(out, (*m).copy());
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn kvt_matcher_mask(m: *mut OneMatcher, bits: *mut u32, n_words: usize, error: *mut Buf) -> i32 {
    guard(error, || (*m).mask(std::slice::from_raw_parts_mut(bits, n_words)))
}

#[no_mangle]
pub unsafe extern "C" fn kvt_matcher_consume(m: *mut OneMatcher, token: i32, error: *mut Buf) -> i32 {
    guard(error, || (*m).consume(token as u32))
}

#[no_mangle]
pub unsafe extern "C" fn kvt_matcher_finished(m: *const OneMatcher) -> u8 {
    (*m).matcher.is_stopped() as u8
}
