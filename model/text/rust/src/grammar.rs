//! Grammars as token masks. A grammar is compiled and followed with limits, so that no schema or regex of a client's can
//! hold a thread or fill memory: the library's own on what it builds, and the meter's on processor time and bytes, which
//! hold whatever it does. $ref is resolved inside the schema only.

use std::ffi::c_void;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::Arc;
use std::time::Duration;

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use meter::{Exceeded, Limits, Spent};
use serde_json::{json, Value};

use crate::border::{
    give, guard, invalid, slice, take_back, Buf, Error, Result, Str, CANCELLED, FAILED_PRECONDITION, INTERNAL,
    RESOURCE_EXHAUSTED,
};
use crate::calls;
use crate::gbnf;
use crate::gbnf_lark;
use crate::schema;
use crate::tags;
use crate::tokenizer::{Tokenizer, NEVER_GENERATED, SPECIAL};
use crate::watch;

const MAX_TEXT: usize = 256 << 10;
const MAX_CHOICES: usize = 4096;
// The library follows rules, brackets and references by recursion: each costs some 4 KB of stack, and what is wrong
// with the last of a chain of rules takes the square of its length to say (2,000: some 4 s).
const MAX_LEVELS: usize = 2_000;
const MAX_REFERENCES: usize = 4_000;
const STACK: usize = 128 << 20; // address space; only what is used becomes memory
const TRIAL_STEPS: usize = 6;
const MAX_TOKEN_BYTES: usize = 900; // the trie's depth is bounded

/// Of one processor. What is served takes a tenth of it; a slow processor may take three times as long.
const COMPILE_TIME: Duration = Duration::from_millis(800);
const STEP_TIME: Duration = Duration::from_millis(250); // of one mask, or of one token's way through the lexer
const STEPS_AHEAD: Duration = Duration::from_millis(500); // of all of them, beside what each token brings
const FORCED_TIME: Duration = Duration::from_millis(5);
const TIME_A_TOKEN: Duration = Duration::from_millis(5);
/// Of one matcher, of all as long as another may begin, and of all.
const MATCHER_BYTES: i64 = 96 << 20;
const BYTES_TO_BEGIN: i64 = 384 << 20;
const ALL_BYTES: i64 = 640 << 20;

pub struct Grammar {
    factory: ParserFactory,
    eos: Vec<u32>,
    specials: Vec<(u32, String)>, // that do not end an answer
    all: Arc<AtomicI64>,          // bytes of the matchers that live
}

pub struct OneMatcher {
    matcher: Matcher,
    eos: Vec<u32>,
    left: Duration,
    bytes: i64,
    all: Arc<AtomicI64>,
}

/// Whether what is asked for is wanted no longer: C's function and its argument.
#[derive(Clone, Copy)]
struct Stopped(Option<unsafe extern "C" fn(*mut c_void) -> u8>, *mut c_void);
unsafe impl Send for Stopped {} // the caller waits, and its function may be called by any thread
unsafe impl Sync for Stopped {}

impl Stopped {
    fn now(&self) -> bool {
        self.0.is_some_and(|f| unsafe { f(self.1) } != 0)
    }
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
        Ok(Grammar { factory, eos, specials, all: Arc::default() })
    }

    fn compile(&self, kind: i32, text: &str, choices: &[&str], stopped: Stopped) -> Result<OneMatcher> {
        room_for_another(&self.all)?;
        std::thread::scope(|scope| {
            let compiling = std::thread::Builder::new()
                .stack_size(STACK)
                .spawn_scoped(scope, || self.compile_metered(kind, text, choices, stopped))
                .map_err(|e| Error { code: RESOURCE_EXHAUSTED, message: format!("no thread to compile it: {e}") })?;
            compiling.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn compile_metered(&self, kind: i32, text: &str, choices: &[&str], stopped: Stopped) -> Result<OneMatcher> {
        let stopped = move || stopped.now();
        let limits = Limits { time: COMPILE_TIME, bytes: MATCHER_BYTES, stopped: &stopped };
        let (made, Spent { bytes, .. }) = meter::within(&limits, || self.compile_here(kind, text, choices));
        let too_much = |what: String| {
            invalid(format!(
                "the grammar cannot be used: to compile it takes more than {what}; what costs most are multipleOf, \
                 patterns that must hold together (allOf, &, ~) and high counts"
            ))
        };
        let mut matcher = made.map_err(|exceeded| match exceeded {
            Exceeded::Time => too_much(format!("{} s of a processor", COMPILE_TIME.as_secs_f32())),
            Exceeded::Bytes => too_much(format!("{} MiB", MATCHER_BYTES >> 20)),
            Exceeded::Stopped => {
                Error { code: CANCELLED, message: "the grammar was not compiled: the request is over".into() }
            }
        })??;
        matcher.now_has(bytes);
        Ok(matcher)
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
            4 if gbnf::is_gbnf(text) => TopLevelGrammar::from_lark(gbnf_lark::lark(text, &|name| self.token(name))?),
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
            if let Some(error) = (kind == 6 && !meter::is_spent()).then(|| self.unusable_tool(text)).flatten() {
                return Err(error);
            }
            return Err(invalid(format!("the grammar cannot be used: {}", shorten(&error))));
        }
        self.try_out(&mut matcher.deep_clone())?;
        Ok(OneMatcher { matcher, eos: self.eos.clone(), left: STEPS_AHEAD, bytes: 0, all: self.all.clone() })
    }

    /// The tool whose parameters no grammar can be made of: a client knows its tools, and not the grammar of all.
    fn unusable_tool(&self, text: &str) -> Option<Error> {
        let calls: calls::Calls = serde_json::from_str(text).ok()?;
        calls.tools.iter().enumerate().find_map(|(i, tool)| {
            let alone = TopLevelGrammar::from_json_schema(schema::prepare(tool.parameters.clone()).ok()?);
            let error = Matcher::new(self.factory.create_parser(alone)).get_error()?;
            Some(invalid(format!("the parameters of tool {i} ({:?}) cannot be used: {}", tool.name, shorten(&error))))
        })
    }

    /// A token by its text, as Lark says it: a special one by its id, another as the text that it is.
    fn token(&self, name: &str) -> Option<String> {
        let special = self.specials.iter().find(|(_, text)| text == name).map(|(id, _)| format!("<[{id}]>"));
        let other = || self.factory.tok_env().tok_trie().token_id(name.as_bytes()).map(|_| calls::literal(name));
        special.or_else(other)
    }

    /// A grammar too ambiguous for the limits shows it in its first steps: better here than in a batch.
    fn try_out(&self, matcher: &mut Matcher) -> Result<()> {
        let mut bits = vec![0u32; self.factory.tok_env().tok_trie().vocab_size().div_ceil(32)];
        for _ in 0..TRIAL_STEPS {
            let refused = |e: Error| invalid(format!("the grammar cannot be used: {}", shorten(&e.message)));
            mask(matcher, &mut bits).map_err(refused)?;
            let Some(word) = bits.iter().position(|&w| w != 0) else {
                return Err(invalid("the grammar cannot be used: no token of this model can begin its text"));
            };
            let token = (word * 32) as u32 + bits[word].trailing_zeros();
            if matcher.is_stopped() {
                break;
            }
            consume(matcher, &self.eos, token).map_err(refused)?;
        }
        Ok(())
    }
}

fn room_for_another(all: &AtomicI64) -> Result<()> {
    match all.load(Ordering::Relaxed) {
        used if used <= BYTES_TO_BEGIN => Ok(()),
        used => Err(Error {
            code: RESOURCE_EXHAUSTED,
            message: format!(
                "the grammars in use have {} MiB; another begins when they have at most {}",
                used >> 20,
                BYTES_TO_BEGIN >> 20
            ),
        }),
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
    let quoted: Vec<String> = choices.iter().map(|c| calls::literal(c)).collect();
    Ok(format!("start: {}\n", quoted.join(" | ")))
}

/// What the library says when it goes on no longer: most often because one of its own limits is reached.
fn gave_up(error: impl std::fmt::Display) -> Error {
    let error = error.to_string();
    let code = if error.contains("too many") || error.contains("limit") { RESOURCE_EXHAUSTED } else { INTERNAL };
    Error { code, message: format!("the grammar stopped: {}", shorten(&error)) }
}

fn mask(matcher: &mut Matcher, bits: &mut [u32]) -> Result<()> {
    let mask = matcher.compute_mask_or_eos().map_err(gave_up)?;
    let words = mask.as_slice();
    let n = words.len().min(bits.len());
    bits[..n].copy_from_slice(&words[..n]);
    bits[n..].fill(0);
    Ok(())
}

fn consume(matcher: &mut Matcher, eos: &[u32], token: u32) -> Result<()> {
    if matcher.is_stopped() && !matcher.is_error() {
        if eos.contains(&token) {
            return Ok(());
        }
        return Err(invalid(format!("token {token} follows the end of the grammar's text")));
    }
    // A refused token leaves the matcher usable.
    match matcher.try_consume_tokens(&[token]) {
        Ok(1) => Ok(()),
        Ok(_) => Err(invalid(format!("token {token} is not one the grammar allows here"))),
        Err(e) => Err(gave_up(e)),
    }
}

/// Nothing where it takes too long: a text that has no end is forced for ever, and the meter does not see it.
fn forced_in_time(mut matcher: Matcher) -> Vec<u8> {
    let watched = matcher.cancellation_handle().and_then(|handle| watch::cancel_after(FORCED_TIME, handle));
    if watched.is_none() {
        return Vec::new();
    }
    matcher.compute_ff_bytes()
}

impl OneMatcher {
    /// Deep: a shallow clone shares its lexer behind a lock, and sequences are masked on many threads.
    fn copy(&self) -> Result<OneMatcher> {
        room_for_another(&self.all)?;
        let before = meter::alive();
        let matcher = self.matcher.deep_clone();
        let bytes = meter::alive() - before;
        let mut copy = OneMatcher { matcher, eos: self.eos.clone(), left: self.left, bytes: 0, all: self.all.clone() };
        copy.now_has(bytes);
        Ok(copy)
    }

    fn now_has(&mut self, more: i64) {
        self.bytes += more;
        self.all.fetch_add(more, Ordering::Relaxed);
    }

    /// `step` within what is left to this matcher of time and bytes.
    fn metered<R>(&mut self, step: impl FnOnce(&mut Matcher, &[u32]) -> Result<R>) -> Result<R> {
        let room = ALL_BYTES - self.all.load(Ordering::Relaxed);
        let bytes = (MATCHER_BYTES - self.bytes).min(room);
        let limits = Limits { time: STEP_TIME.min(self.left), bytes, stopped: &|| false };
        let (done, spent) = meter::within(&limits, || step(&mut self.matcher, &self.eos));
        self.left = self.left.saturating_sub(spent.time);
        self.now_has(spent.bytes);
        let too_much = |what: String| Error {
            code: RESOURCE_EXHAUSTED,
            message: format!("the grammar takes more than {what} to follow; simplify it"),
        };
        done.map_err(|exceeded| match exceeded {
            Exceeded::Bytes => too_much(format!("{} MiB", bytes.max(0) >> 20)),
            _ => too_much(format!("{} ms of a processor at once, or {TIME_A_TOKEN:?} a token", STEP_TIME.as_millis())),
        })?
    }

    fn mask(&mut self, bits: &mut [u32]) -> Result<()> {
        self.metered(|matcher, _| mask(matcher, bits))
    }

    /// Bytes that come next whatever is drawn; a special token is 0xFF and its id in brackets. Asked of a copy: bytes that
    /// were forced into a parser stay there, and its masks then know nothing of special tokens.
    fn forced(&mut self) -> Result<Vec<u8>> {
        if self.matcher.is_stopped() {
            return Ok(Vec::new());
        }
        self.metered(|matcher, _| Ok(forced_in_time(matcher.clone().into_cancellable())))
    }

    fn consume(&mut self, token: u32) -> Result<()> {
        self.metered(|matcher, eos| consume(matcher, eos, token))?;
        self.left = (self.left + TIME_A_TOKEN).min(STEPS_AHEAD);
        Ok(())
    }
}

impl Drop for OneMatcher {
    fn drop(&mut self) {
        self.all.fetch_sub(self.bytes, Ordering::Relaxed);
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
    stopped: Option<unsafe extern "C" fn(*mut c_void) -> u8>,
    stopped_of: *mut c_void,
    out: *mut *mut OneMatcher,
    error: *mut Buf,
) -> i32 {
    guard(error, || {
        let mut texts = Vec::with_capacity(n_choices);
        for choice in slice(choices, n_choices) {
            texts.push(choice.text("choice")?);
        }
        let stopped = Stopped(stopped, stopped_of);
        give(out, (*g).compile(kind, text.text("the grammar")?, &texts, stopped)?);
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
        give(out, (*m).copy()?);
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn kvt_matcher_bytes(m: *const OneMatcher) -> usize {
    (*m).bytes.max(0) as usize
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
pub unsafe extern "C" fn kvt_matcher_forced(m: *mut OneMatcher, out: *mut Buf, error: *mut Buf) -> i32 {
    guard(error, || {
        out.write(Buf::of((*m).forced()?));
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn kvt_matcher_finished(m: *const OneMatcher) -> u8 {
    (*m).matcher.is_stopped() as u8
}
