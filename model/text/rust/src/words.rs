//! How a pre-tokenizer cuts a text into the pieces that are merged, without the library's record of where each came
//! from: steps of the kinds that byte-level vocabularies and SentencePiece's have, to the same pieces. What is not among
//! them is left to the library (`Words` are none).

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
    /// Between white space.
    White,
    /// Behind each of these.
    Behind(String),
    /// A mark for each space, and where wanted one in front; a piece begins with each.
    Marks { mark: String, front: Front, split: bool },
}

#[derive(Clone, Copy, PartialEq)]
enum Front {
    Never,
    OfText,
    OfPiece,
}

pub struct Words {
    steps: Vec<Step>,
}

fn parts(pre_tokenizer: &Value) -> Option<&[Value]> {
    match pre_tokenizer["type"].as_str() {
        None => Some(&[]),
        Some("Sequence") => pre_tokenizer["pretokenizers"].as_array().map(Vec::as_slice),
        Some(_) => Some(std::slice::from_ref(pre_tokenizer)),
    }
}

impl Words {
    /// Of a pre-tokenizer that leaves characters as they are, but for spaces. `moved`: a text's beginning may be none.
    pub fn of_chars(pre_tokenizer: &Value, moved: bool) -> Option<Words> {
        let steps = parts(pre_tokenizer)?.iter().map(step).collect::<Option<Vec<Step>>>()?;
        let of_text = |step: &Step| matches!(step, Step::Marks { front: Front::OfText, .. });
        let unclear = (moved || steps.len() > 1) && steps.iter().any(of_text);
        (!unclear).then_some(Words { steps })
    }

    /// Texts stay whole.
    pub fn whole() -> Words {
        Words { steps: Vec::new() }
    }

    /// Of a pre-tokenizer that ends by writing bytes as characters.
    pub fn of_bytes(pre_tokenizer: &Value) -> Option<Words> {
        let (last, before) = parts(pre_tokenizer)?.split_last()?;
        let mut steps = before.iter().map(step).collect::<Option<Vec<Step>>>()?;
        if last["type"] != "ByteLevel" || last["add_prefix_space"] != Value::Bool(false) {
            return None;
        }
        if last["use_regex"] != Value::Bool(false) {
            steps.push(pattern(GPT2)?);
        }
        Some(Words { steps })
    }

    /// Each piece in turn, none of them empty. `first`: the text begins here.
    pub fn each(&self, text: &str, first: bool, found: &mut dyn FnMut(&str)) {
        cut(&self.steps, text, first, found)
    }
}

fn step(part: &Value) -> Option<Step> {
    match part["type"].as_str()? {
        "Digits" => Some(Step::Digits { alone: part["individual_digits"].as_bool()? }),
        "Split" if part["behavior"] == "Isolated" && part["invert"] != Value::Bool(true) => {
            pattern(part["pattern"]["Regex"].as_str()?)
        }
        "Split" if part["behavior"] == "MergedWithPrevious" && part["invert"] != Value::Bool(true) => {
            Some(Step::Behind(part["pattern"]["String"].as_str().filter(|text| !text.is_empty())?.to_string()))
        }
        "WhitespaceSplit" => Some(Step::White),
        "Metaspace" => {
            let front = match part["prepend_scheme"].as_str()? {
                "always" => Front::OfPiece,
                "first" => Front::OfText,
                _ => Front::Never,
            };
            Some(Step::Marks {
                mark: part["replacement"].as_str()?.to_string(),
                front,
                split: part["split"].as_bool()?,
            })
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

fn cut(steps: &[Step], text: &str, first: bool, found: &mut dyn FnMut(&str)) {
    if text.is_empty() {
        return;
    }
    let Some((step, rest)) = steps.split_first() else {
        return found(text);
    };
    let mut next = |piece: &str| cut(rest, piece, first, found);
    match step {
        Step::Digits { alone } => cut_digits(*alone, text, &mut next),
        Step::Pattern { regex, spaces } => cut_matches(regex, *spaces, text, &mut next),
        Step::White => text.split(char::is_whitespace).for_each(next),
        Step::Behind(what) => text.split_inclusive(what.as_str()).for_each(next),
        Step::Marks { mark, front, split } => {
            let wanted = *front == Front::OfPiece || *front == Front::OfText && first;
            cut_marks(mark, wanted && !text.starts_with([' ']) && !text.starts_with(mark), *split, text, &mut next)
        }
    }
}

fn cut_marks(mark: &str, in_front: bool, split: bool, text: &str, found: &mut dyn FnMut(&str)) {
    let mut marked = String::with_capacity(mark.len() + text.len());
    if in_front {
        marked.push_str(mark);
    }
    for (i, part) in text.split(' ').enumerate() {
        if i > 0 {
            marked.push_str(mark);
        }
        marked.push_str(part);
    }
    let mut begin = 0;
    for (at, _) in marked.match_indices(mark).filter(|&(at, _)| split && at > 0) {
        found(&marked[begin..at]);
        begin = at;
    }
    found(&marked[begin..]);
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
