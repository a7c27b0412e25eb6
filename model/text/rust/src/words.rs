//! How a pre-tokenizer cuts a text into the pieces that are merged, without the library's record of where each came
//! from: steps of the kinds that byte-level vocabularies have, to the same pieces. What is not among them is left to
//! the library (`Words::of` is none).

use regex_automata::meta::Regex;
use regex_automata::Input;
use regex_syntax::hir::{Hir, HirKind};
use serde_json::Value;

use crate::cuts::GPT2;

/// White space up to the last one before a word, which goes with the word; then what is left.
const SPACES: &str = r"|\s+(?!\S)|\s+";

enum Step {
    /// Matches, and what stands between them.
    Pattern { regex: Regex, spaces: bool },
    /// Each digit by itself, or runs of them.
    Digits { alone: bool },
}

pub struct Words {
    steps: Vec<Step>,
}

impl Words {
    /// Of a pre-tokenizer that ends by writing bytes as characters.
    pub fn of(pre_tokenizer: &Value) -> Option<Words> {
        let single = std::slice::from_ref(pre_tokenizer);
        let parts = match pre_tokenizer["type"].as_str()? {
            "Sequence" => pre_tokenizer["pretokenizers"].as_array()?.as_slice(),
            _ => single,
        };
        let (last, before) = parts.split_last()?;
        let mut steps = before.iter().map(step).collect::<Option<Vec<Step>>>()?;
        if last["type"] != "ByteLevel" || last["add_prefix_space"] != Value::Bool(false) {
            return None;
        }
        if last["use_regex"] != Value::Bool(false) {
            steps.push(pattern(GPT2)?);
        }
        Some(Words { steps })
    }

    /// Each piece in turn, none of them empty.
    pub fn each(&self, text: &str, found: &mut dyn FnMut(&str)) {
        cut(&self.steps, text, found)
    }
}

fn step(part: &Value) -> Option<Step> {
    match part["type"].as_str()? {
        "Digits" => Some(Step::Digits { alone: part["individual_digits"].as_bool()? }),
        "Split" if part["behavior"] == "Isolated" && part["invert"] != Value::Bool(true) => {
            pattern(part["pattern"]["Regex"].as_str()?)
        }
        _ => None,
    }
}

fn pattern(whole: &str) -> Option<Step> {
    // Ruby's syntax reads these as possessive, this one as repeated twice.
    let digits_before = |at: usize| whole[..at].ends_with(|c: char| c.is_ascii_digit() || c == ',');
    let possessive = ["?+", "*+", "++"].iter().any(|two| whole.contains(two))
        || whole.match_indices("}+").any(|(at, _)| digits_before(at));
    let words = whole.strip_suffix(SPACES);
    let hir = regex_syntax::parse(words.unwrap_or(whole)).ok()?;
    if possessive || looks_around(&hir) || hir.properties().minimum_len().unwrap_or(0) == 0 {
        return None;
    }
    let hirs = match words {
        Some(_) => vec![hir, regex_syntax::parse(r"\s+").ok()?],
        None => vec![hir],
    };
    let regex = Regex::builder().build_many_from_hir(&hirs).ok()?;
    Some(Step::Pattern { regex, spaces: words.is_some() })
}

fn looks_around(hir: &Hir) -> bool {
    match hir.kind() {
        HirKind::Look(_) => true,
        HirKind::Capture(capture) => looks_around(&capture.sub),
        HirKind::Repetition(repetition) => looks_around(&repetition.sub),
        HirKind::Concat(parts) | HirKind::Alternation(parts) => parts.iter().any(looks_around),
        _ => false,
    }
}

fn cut(steps: &[Step], text: &str, found: &mut dyn FnMut(&str)) {
    if text.is_empty() {
        return;
    }
    let Some((first, rest)) = steps.split_first() else {
        return found(text);
    };
    match first {
        Step::Digits { alone } => cut_digits(*alone, text, &mut |piece| cut(rest, piece, found)),
        Step::Pattern { regex, spaces } => cut_matches(regex, *spaces, text, &mut |piece| cut(rest, piece, found)),
    }
}

fn cut_digits(alone: bool, text: &str, found: &mut dyn FnMut(&str)) {
    let mut begin = 0;
    let mut within = None; // whether the piece that began there is of digits
    for (at, c) in text.char_indices() {
        let digit = c.is_numeric();
        if within.is_some_and(|before| before != digit || digit && alone) {
            found(&text[begin..at]);
            begin = at;
        }
        within = Some(digit);
    }
    found(&text[begin..]);
}

fn cut_matches(regex: &Regex, spaces: bool, text: &str, found: &mut dyn FnMut(&str)) {
    let mut begin = 0;
    let mut input = Input::new(text);
    while let Some(m) = regex.search(&input) {
        let mut end = m.end();
        if spaces && m.pattern().as_usize() == 1 && end < text.len() {
            let last = text[m.start()..end].chars().next_back().map_or(0, char::len_utf8);
            if end - last > m.start() {
                end -= last;
            }
        }
        if begin < m.start() {
            found(&text[begin..m.start()]);
        }
        found(&text[m.start()..end]);
        begin = end;
        input.set_start(end);
    }
    if begin < text.len() {
        found(&text[begin..]);
    }
}
