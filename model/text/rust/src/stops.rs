//! Regular expressions that end a text as soon as one of them matches, whatever pieces the text comes in. All of them are
//! one automaton that is followed byte by byte: a byte costs at most as much as the automaton has states, which are
//! bounded, however long the text is.

use std::sync::Arc;

use regex_automata::nfa::thompson::{Compiler, Config, State, WhichCaptures, NFA};
use regex_automata::util::primitives::StateID;
use regex_syntax::hir::{Hir, HirKind, Look};

use crate::border::{give, guard, invalid, slice, take_back, Buf, Result, Str};

const MOST_BYTES: usize = 128 << 10; // of the automaton; a class such as \w has 16 KiB

pub struct Stops {
    nfa: NFA,
}

impl Stops {
    fn compile(expressions: &[&str]) -> Result<Stops> {
        let mut all = Vec::with_capacity(expressions.len());
        for (i, expression) in expressions.iter().enumerate() {
            let hir = regex_syntax::parse(expression).map_err(|e| {
                let why = e.to_string();
                let why = why.lines().last().unwrap_or("").trim_start_matches("error: ").to_string();
                invalid(format!("[{i}] is no regular expression that is served here: {why}"))
            })?;
            if hir.properties().minimum_len() == Some(0) {
                return Err(invalid(format!("[{i}] matches an empty text, and so would end every answer before it begins")));
            }
            all.push(words_of_ascii(hir));
        }
        let config = Config::new().nfa_size_limit(Some(MOST_BYTES)).which_captures(WhichCaptures::None);
        let nfa = Compiler::new().configure(config).build_many_from_hir(&all).map_err(|e| match e.size_limit() {
            Some(limit) => invalid(format!(
                ": together they need more than {} KiB as an automaton; use smaller counts and classes",
                limit >> 10
            )),
            None => invalid(format!(": {e}")),
        })?;
        Ok(Stops { nfa })
    }
}

/// Where a word begins and ends is told by ASCII letters: what lies around a place is looked at by single bytes.
fn words_of_ascii(hir: Hir) -> Hir {
    let each = |all: Vec<Hir>| all.into_iter().map(words_of_ascii).collect();
    match hir.into_kind() {
        HirKind::Empty => Hir::empty(),
        HirKind::Literal(literal) => Hir::literal(literal.0),
        HirKind::Class(class) => Hir::class(class),
        HirKind::Look(look) => Hir::look(match look {
            Look::WordUnicode => Look::WordAscii,
            Look::WordUnicodeNegate => Look::WordAsciiNegate,
            Look::WordStartUnicode => Look::WordStartAscii,
            Look::WordEndUnicode => Look::WordEndAscii,
            Look::WordStartHalfUnicode => Look::WordStartHalfAscii,
            Look::WordEndHalfUnicode => Look::WordEndHalfAscii,
            other => other,
        }),
        HirKind::Repetition(mut repetition) => {
            repetition.sub = Box::new(words_of_ascii(*repetition.sub));
            Hir::repetition(repetition)
        }
        HirKind::Capture(mut capture) => {
            capture.sub = Box::new(words_of_ascii(*capture.sub));
            Hir::capture(capture)
        }
        HirKind::Concat(all) => Hir::concat(each(all)),
        HirKind::Alternation(all) => Hir::alternation(each(all)),
    }
}

/// One text.
pub struct Scan {
    stops: Arc<Stops>,
    last: Option<u8>,    // what the text ends with
    entered: Vec<StateID>, // by that byte
    here: Vec<StateID>,  // those and what they reach without another byte
    seen: Vec<u32>,      // of each state: the visit in which it was reached
    visit: u32,
}

impl Scan {
    fn new(stops: Arc<Stops>) -> Scan {
        let states = stops.nfa.states().len();
        Scan { stops, last: None, entered: Vec::new(), here: Vec::new(), seen: vec![0; states], visit: 0 }
    }

    /// Where in `more` the first match ends, and whose it is. The text's end so far counts as its end.
    fn push(&mut self, more: &[u8]) -> Option<(usize, usize)> {
        for (i, &byte) in more.iter().enumerate() {
            if let Some(which) = self.reach(Some(byte)) {
                return Some((i, which));
            }
            self.step(byte);
        }
        self.reach(None).map(|which| (more.len(), which))
    }

    /// All states of this place, where `next` is what follows; the first expression that has matched.
    fn reach(&mut self, next: Option<u8>) -> Option<usize> {
        let nfa = &self.stops.nfa;
        let around = [self.last.or(next).unwrap_or(0), next.unwrap_or(0)];
        let at = self.last.is_some() as usize;
        let around = &around[..at + next.is_some() as usize];
        if self.visit == u32::MAX {
            self.seen.fill(0);
            self.visit = 0;
        }
        self.visit += 1;
        self.here.clear();
        let mut matched: Option<usize> = None;
        let mut open = self.entered.clone();
        open.push(nfa.start_anchored()); // a match may begin anywhere
        while let Some(id) = open.pop() {
            if std::mem::replace(&mut self.seen[id.as_usize()], self.visit) == self.visit {
                continue;
            }
            match nfa.state(id) {
                State::ByteRange { .. } | State::Sparse(_) | State::Dense(_) => self.here.push(id),
                State::Look { look, next } => {
                    if nfa.look_matcher().matches(*look, around, at) {
                        open.push(*next);
                    }
                }
                State::Union { alternates } => open.extend(alternates.iter()),
                State::BinaryUnion { alt1, alt2 } => open.extend([*alt1, *alt2]),
                State::Capture { next, .. } => open.push(*next),
                State::Fail => {}
                State::Match { pattern_id } => {
                    let which = pattern_id.as_usize();
                    matched = Some(matched.map_or(which, |m| m.min(which)));
                }
            }
        }
        matched
    }

    fn step(&mut self, byte: u8) {
        let nfa = &self.stops.nfa;
        self.entered.clear();
        for &id in &self.here {
            let next = match nfa.state(id) {
                State::ByteRange { trans } => trans.matches_byte(byte).then_some(trans.next),
                State::Sparse(sparse) => sparse.matches_byte(byte),
                State::Dense(dense) => dense.matches_byte(byte),
                _ => None,
            };
            self.entered.extend(next);
        }
        self.last = Some(byte);
    }
}

#[no_mangle]
pub unsafe extern "C" fn kvt_stops_compile(
    expressions: *const Str,
    n: usize,
    out: *mut *mut Arc<Stops>,
    error: *mut Buf,
) -> i32 {
    guard(error, || {
        let texts: Result<Vec<&str>> = slice(expressions, n).iter().map(|e| e.text("an expression")).collect();
        give(out, Arc::new(Stops::compile(&texts?)?));
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn kvt_stops_free(stops: *mut Arc<Stops>) {
    take_back(stops)
}

#[no_mangle]
pub unsafe extern "C" fn kvt_scan_new(stops: *const Arc<Stops>, out: *mut *mut Scan, error: *mut Buf) -> i32 {
    guard(error, || {
        give(out, Scan::new((*stops).clone()));
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn kvt_scan_free(scan: *mut Scan) {
    take_back(scan)
}

#[no_mangle]
pub unsafe extern "C" fn kvt_scan_push(
    scan: *mut Scan,
    more: Str,
    found: *mut u8,
    end: *mut usize,
    which: *mut usize,
    error: *mut Buf,
) -> i32 {
    guard(error, || {
        let hit = (*scan).push(more.bytes());
        found.write(hit.is_some() as u8);
        let (at, expression) = hit.unwrap_or((0, 0));
        end.write(at);
        which.write(expression);
        Ok(())
    })
}
