//! Where a text may be cut so that the tokens of its parts, one after the other, are the tokens of the whole.
//!
//! A place is known by the characters on its two sides: L before it, R behind it. It is one where nothing joins them: no
//! match of a pattern that cuts the text holds an L followed by an R (read off the pattern itself), no normalizer
//! changes either, no added token spans it, and either a pattern always ends at it or no token of the model has it inside.
//! What is not known here to hold is taken not to: such a tokenizer's texts are encoded whole.

use regex_syntax::hir::{Class, ClassUnicode, ClassUnicodeRange, Hir, HirKind};
use serde_json::Value;
use tokenizers::AddedToken;

/// Letters, digits and punctuation that every version of Unicode in use agrees on.
const LETTERS: &str = r"[A-Za-z\u{C0}-\u{D6}\u{D8}-\u{F6}\u{F8}-\u{24F}\u{391}-\u{3A1}\u{3A3}-\u{3C9}\u{410}-\u{44F}\u{5D0}-\u{5EA}\u{621}-\u{63A}\u{641}-\u{64A}\u{905}-\u{939}\u{E01}-\u{E2E}\u{3041}-\u{3094}\u{30A1}-\u{30FA}\u{4E00}-\u{9FA5}\u{AC00}-\u{D7A3}]";
const DIGITS: &str = "[0-9]";
const MARKS: &str = r"[!-/:-@\[-`{-~\u{3001}\u{3002}\u{300C}\u{300D}\u{FF01}\u{FF0C}\u{FF1A}\u{FF1B}\u{FF1F}]";

/// Sides of places that texts have many of; each pair is tried by itself.
const PAIRS: [(&str, &str); 13] = [
    (LETTERS, " "),
    (DIGITS, " "),
    (MARKS, " "),
    (LETTERS, r"\n"),
    (DIGITS, r"\n"),
    (MARKS, r"\n"),
    (LETTERS, "[.,!?\u{3001}\u{3002}\u{FF01}\u{FF0C}\u{FF1F}]"),
    (LETTERS, r"[;()={}+]"),
    (LETTERS, r"[\x22\[\]&%$]"),
    (LETTERS, r"[-:/]"),
    (LETTERS, DIGITS),
    (DIGITS, "[A-Za-z]"),
    (DIGITS, "[.,;(){}=+]"),
];
/// Characters that NFC, NFKC and lowercasing leave alone or among themselves, whatever stands beside them.
const STABLE: &str =
    r"[\x00-\x7F\u{410}-\u{44F}\u{3041}-\u{3094}\u{30A1}-\u{30F4}\u{3001}\u{3002}\u{4E00}-\u{9FFF}\u{AC00}-\u{D7A3}]";
pub const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const BLOCK: char = '\u{2581}'; // SentencePiece's space

#[derive(Clone)]
struct Pair {
    left: ClassUnicode,
    right: ClassUnicode,
}

/// The places of one tokenizer.
#[derive(Default)]
pub struct Cuts {
    pairs: Vec<Pair>,
    /// The normalizer puts a block before each text: the space behind a place is left out, and so comes back.
    drops_space: bool,
}

impl Cuts {
    pub fn any(&self) -> bool {
        !self.pairs.is_empty()
    }

    /// The first place from `from` on and before `to`: where the part before it ends, and where the next begins.
    pub fn next(&self, text: &str, from: usize, to: usize) -> Option<(usize, usize)> {
        if !self.any() {
            return None;
        }
        let mut at = from.max(1);
        while !text.is_char_boundary(at) {
            at += 1;
        }
        let mut before = text[..at].chars().next_back()?;
        let mut rest = text[at..].chars();
        while let Some(behind) = rest.next().filter(|_| at < to) {
            if self.pairs.iter().any(|pair| holds(&pair.left, before) && holds(&pair.right, behind)) {
                let begin = at + if self.drops_space { behind.len_utf8() } else { 0 };
                // What takes the space's place must be in front of a letter: not of the end, nor of an added token.
                let next = rest.clone().next();
                if !self.drops_space || next.is_some_and(|c| self.pairs.iter().any(|pair| holds(&pair.left, c))) {
                    return Some((at, begin));
                }
            }
            at += behind.len_utf8();
            before = behind;
        }
        None
    }
}

/// Something this file does not know: no pair is safe.
struct Unknown;
type Known<T> = std::result::Result<T, Unknown>;

fn class(pattern: &str) -> ClassUnicode {
    match regex_syntax::parse(pattern).map(|hir| ends(&hir)) {
        Ok(Ok(ends)) => ends.first,
        _ => unreachable!("a class of this file"),
    }
}
fn one(c: char) -> ClassUnicode {
    ClassUnicode::new([ClassUnicodeRange::new(c, c)])
}
fn holds(class: &ClassUnicode, c: char) -> bool {
    class
        .ranges()
        .binary_search_by(|r| {
            if r.end() < c {
                std::cmp::Ordering::Less
            } else if r.start() > c {
                std::cmp::Ordering::Greater
            } else {
                std::cmp::Ordering::Equal
            }
        })
        .is_ok()
}
fn meets(a: &ClassUnicode, b: &ClassUnicode) -> bool {
    let mut both = a.clone();
    both.intersect(b);
    !both.ranges().is_empty()
}
fn within(a: &ClassUnicode, b: &ClassUnicode) -> bool {
    let mut rest = a.clone();
    rest.difference(b);
    rest.ranges().is_empty()
}

/// What strings of a pattern may begin and end with, and which of them are one character.
struct Ends {
    empty: bool,
    first: ClassUnicode,
    last: ClassUnicode,
    single: ClassUnicode,
}

fn ends(hir: &Hir) -> Known<Ends> {
    let none = || ClassUnicode::empty();
    Ok(match hir.kind() {
        HirKind::Empty => Ends { empty: true, first: none(), last: none(), single: none() },
        HirKind::Look(_) => return Err(Unknown),
        HirKind::Literal(literal) => {
            let text = std::str::from_utf8(&literal.0).map_err(|_| Unknown)?;
            let (first, last) = (text.chars().next().ok_or(Unknown)?, text.chars().next_back().ok_or(Unknown)?);
            let single = if text.chars().count() == 1 { one(first) } else { none() };
            Ends { empty: false, first: one(first), last: one(last), single }
        }
        HirKind::Class(Class::Unicode(c)) => {
            Ends { empty: false, first: c.clone(), last: c.clone(), single: c.clone() }
        }
        HirKind::Class(Class::Bytes(c)) if c.ranges().is_empty() => {
            Ends { empty: false, first: none(), last: none(), single: none() } // matches nothing at all
        }
        HirKind::Class(Class::Bytes(_)) => return Err(Unknown),
        HirKind::Capture(capture) => ends(&capture.sub)?,
        HirKind::Repetition(r) => {
            let mut sub = ends(&r.sub)?;
            if r.min > 1 && !sub.empty || r.max == Some(0) {
                sub.single = none();
            }
            sub.empty |= r.min == 0;
            sub
        }
        HirKind::Alternation(ways) => {
            let mut all = Ends { empty: false, first: none(), last: none(), single: none() };
            for way in ways {
                let way = ends(way)?;
                all.empty |= way.empty;
                all.first.union(&way.first);
                all.last.union(&way.last);
                all.single.union(&way.single);
            }
            all
        }
        HirKind::Concat(parts) => {
            let mut all = Ends { empty: true, first: none(), last: none(), single: none() };
            for part in parts {
                let part = ends(part)?;
                if all.empty {
                    all.first.union(&part.first);
                }
                // One character: of the part behind nothing, or of those before it with nothing behind.
                if !part.empty {
                    all.single = none();
                    all.last = none();
                }
                if all.empty {
                    all.single.union(&part.single);
                }
                all.last.union(&part.last);
                all.empty &= part.empty;
            }
            all
        }
    })
}

/// Whether a string of the pattern may hold an L followed by an R.
fn joins(hir: &Hir, pair: &Pair) -> Known<bool> {
    Ok(match hir.kind() {
        HirKind::Empty | HirKind::Class(_) => false,
        HirKind::Look(_) => return Err(Unknown),
        HirKind::Literal(literal) => adjacent(std::str::from_utf8(&literal.0).map_err(|_| Unknown)?, pair),
        HirKind::Capture(capture) => joins(&capture.sub, pair)?,
        HirKind::Repetition(r) => {
            let sub = ends(&r.sub)?;
            let twice = r.max.is_none_or(|most| most > 1);
            joins(&r.sub, pair)? || twice && meets(&sub.last, &pair.left) && meets(&sub.first, &pair.right)
        }
        HirKind::Alternation(ways) => {
            for way in ways {
                if joins(way, pair)? {
                    return Ok(true);
                }
            }
            false
        }
        HirKind::Concat(parts) => {
            let mut last = ClassUnicode::empty(); // of what stands before the next part
            for part in parts {
                let next = ends(part)?;
                if joins(part, pair)? || meets(&last, &pair.left) && meets(&next.first, &pair.right) {
                    return Ok(true);
                }
                if !next.empty {
                    last = ClassUnicode::empty();
                }
                last.union(&next.last);
            }
            false
        }
    })
}

fn adjacent(text: &str, pair: &Pair) -> bool {
    let behind = text.chars().skip(1);
    text.chars().zip(behind).any(|(a, b)| holds(&pair.left, a) && holds(&pair.right, b))
}

/// Whether a match of the pattern always ends between L and R. What looks ahead is only known of white space: before an L,
/// which is none, it sees what it saw in the whole.
fn pattern_ends(pattern: &str, pair: &Pair) -> Known<bool> {
    const LOOKING: [&str; 2] = [r"\s+(?!\S)", r"\s+$"];
    // With those as if they saw what they want, to be sure of what may match; without them, of what must.
    let read = |by: &str| {
        let plain = LOOKING.iter().fold(pattern.to_string(), |pattern, looking| pattern.replace(looking, by));
        regex_syntax::parse(&plain).map_err(|_| Unknown)
    };
    let (most, least) = (read(r"\s+")?, read(r"[^\s\S]")?);
    if joins(&most, pair)? || ends(&most)?.empty {
        return Err(Unknown);
    }
    let single = ends(&least)?.single;
    Ok(within(&pair.left, &single) || within(&pair.right, &single))
}

/// Goes through the normalizer and the steps that cut a text, with the sides as each step sees them.
struct Walk {
    pair: Pair,
    ends: bool, // some step always cuts here
    drops_space: bool,
}

impl Walk {
    fn space(&self) -> bool {
        within(&self.pair.right, &one(' '))
    }

    fn only(&self, alphabet: &str) -> Known<()> {
        let alphabet = class(alphabet);
        (within(&self.pair.left, &alphabet) && within(&self.pair.right, &alphabet)).then_some(()).ok_or(Unknown)
    }

    fn normalizer(&mut self, n: &Value) -> Known<()> {
        match n["type"].as_str() {
            None if n.is_null() => Ok(()),
            Some("Sequence") => {
                n["normalizers"].as_array().ok_or(Unknown)?.iter().try_for_each(|part| self.normalizer(part))
            }
            Some("NFC" | "NFKC" | "Lowercase") => self.only(STABLE),
            Some("NFD" | "NFKD" | "StripAccents" | "BertNormalizer" | "Precompiled" | "Nmt") => {
                self.only(r"[\x00-\x7F]")
            }
            Some("Strip") if n["strip_left"] == Value::Bool(false) => Ok(()),
            Some("Prepend") if n["prepend"] == "\u{2581}" && self.space() => {
                self.drops_space = true;
                Ok(())
            }
            Some("Replace") if n["pattern"]["String"] == " " && n["content"] == "\u{2581}" => {
                self.becomes_block();
                Ok(())
            }
            Some("Replace") if n["pattern"]["Regex"] == " {2,}" => Ok(()),
            _ => Err(Unknown),
        }
    }

    fn becomes_block(&mut self) {
        if self.space() {
            self.pair.right = one(BLOCK);
        }
    }

    /// As ByteLevel writes the two sides.
    fn becomes_bytes(&mut self) {
        let written = |side: &ClassUnicode| {
            let mut out = side.clone();
            out.intersect(&class("[!-~]"));
            for (byte, shown) in [(' ', '\u{120}'), ('\n', '\u{10A}')] {
                if holds(side, byte) {
                    out.union(&one(shown));
                }
            }
            if !within(side, &class(r"[\n -~]")) {
                out.union(&class(r"[\u{A1}-\u{143}]"));
            }
            out
        };
        self.pair = Pair { left: written(&self.pair.left), right: written(&self.pair.right) };
    }

    fn pre_tokenizer(&mut self, p: &Value) -> Known<()> {
        let white = || class(r"\s");
        let kept = matches!(p["behavior"].as_str(), Some("Isolated" | "Removed"));
        match p["type"].as_str() {
            None if p.is_null() => {}
            Some("Sequence") => {
                let steps = p["pretokenizers"].as_array().ok_or(Unknown)?;
                steps.iter().try_for_each(|step| self.pre_tokenizer(step))?;
            }
            // Spaces that are none by now, or stand on neither side.
            Some("Split") if p["behavior"] == "MergedWithPrevious" && p["pattern"]["String"] == " " => {
                if [&self.pair.left, &self.pair.right].iter().any(|side| holds(side, ' ')) {
                    return Err(Unknown);
                }
            }
            Some("Split") if kept => {
                let pattern = match (p["pattern"]["Regex"].as_str(), p["pattern"]["String"].as_str()) {
                    (Some(regex), _) => regex.to_string(),
                    (_, Some(text)) => regex_syntax::escape(text),
                    _ => return Err(Unknown),
                };
                self.ends |= pattern_ends(&pattern, &self.pair)?;
            }
            Some("ByteLevel") => {
                if p["add_prefix_space"] != Value::Bool(false) && !self.space() {
                    return Err(Unknown);
                }
                if p["use_regex"] != Value::Bool(false) {
                    self.ends |= pattern_ends(GPT2, &self.pair)?;
                }
                self.becomes_bytes();
            }
            Some("Digits") => self.ends |= pattern_ends(r"\p{N}+", &self.pair)?,
            Some("Punctuation") if kept || p["behavior"] == "Contiguous" => {}
            Some("Whitespace") => self.ends |= pattern_ends(r"\w+|[^\w\s]+", &self.pair)?,
            Some("WhitespaceSplit" | "BertPreTokenizer") => self.ends |= within(&self.pair.right, &white()),
            Some("Metaspace") if self.space() && p["replacement"] == "\u{2581}" => {
                self.ends |= p["split"] != Value::Bool(false);
                self.becomes_block();
            }
            _ => return Err(Unknown),
        }
        Ok(())
    }
}

/// What of a model matters where no step always cuts.
pub struct Joining<'a> {
    /// Whether parts of a piece are joined pair by pair, into tokens of the vocabulary and nothing else.
    pub by_pairs: bool,
    pub vocabulary: Box<dyn Iterator<Item = String> + 'a>,
}

fn no_token_joins(joining: Joining, pair: &Pair) -> bool {
    let mut alone = false; // R by itself is a token: it is never a part of an unknown one
    let mut bytes = pair.clone();
    bytes.left.union(&one('>')); // <0x0A>, a byte
    for token in joining.vocabulary {
        if adjacent(&token, pair) || token.len() > 6 && token.starts_with("<0x") && adjacent(&token, &bytes) {
            return false;
        }
        let mut chars = token.chars();
        alone |= chars.next().is_some_and(|c| holds(&pair.right, c)) && chars.next().is_none();
    }
    alone && is_single(&pair.right)
}

fn is_single(class: &ClassUnicode) -> bool {
    class.ranges().len() == 1 && class.ranges()[0].len() == 1
}

/// What stands before one of `right` in some token, a space as a block too; the ends of added tokens.
fn joined_to(joining: Joining, added: &[AddedToken], right: &ClassUnicode) -> ClassUnicode {
    let behind = |c: char| holds(right, c) || c == BLOCK && holds(right, ' ');
    let ends = |token: &AddedToken| [token.content.chars().next(), token.content.chars().next_back()];
    let mut left: Vec<char> = added.iter().flat_map(ends).flatten().collect();
    for token in joining.vocabulary {
        let pairs = token.chars().zip(token.chars().skip(1));
        left.extend(pairs.filter(|&(_, b)| behind(b)).map(|(a, _)| a));
    }
    ClassUnicode::new(left.into_iter().map(|c| ClassUnicodeRange::new(c, c)))
}

fn added_token_joins(token: &AddedToken, pair: &Pair, drops_space: bool) -> bool {
    let (first, last) = (token.content.chars().next(), token.content.chars().next_back());
    let begins = |class: &ClassUnicode| first.is_some_and(|c| holds(class, c));
    let ends = last.is_some_and(|c| holds(&pair.left, c));
    adjacent(&token.content, pair)
        || token.single_word && (ends || begins(&pair.right))
        || drops_space && (ends || begins(&pair.left))
}

/// `joining`: made anew for each pair that needs it.
pub fn find<'a>(
    normalizer: &Value,
    pre_tokenizer: &Value,
    added: &[AddedToken],
    joining: impl Fn() -> Joining<'a>,
) -> Cuts {
    let mut cuts = Cuts::default();
    for (left, right) in PAIRS {
        let mut pair = Pair { left: class(left), right: class(right) };
        let safe = |pair: &Pair| -> Option<bool> {
            let mut walk = Walk { pair: pair.clone(), ends: false, drops_space: false };
            walk.normalizer(normalizer).ok()?;
            walk.pre_tokenizer(pre_tokenizer).ok()?;
            if walk.drops_space && holds(&walk.pair.right, ' ') {
                return None; // nothing makes blocks of spaces
            }
            let seen = [pair, &walk.pair];
            if added.iter().any(|token| seen.iter().any(|pair| added_token_joins(token, pair, walk.drops_space))) {
                return None;
            }
            if !walk.ends {
                let joining = joining();
                if !joining.by_pairs || !no_token_joins(joining, &walk.pair) {
                    return None;
                }
            }
            Some(walk.drops_space)
        };
        let mut found = safe(&pair);
        if found.is_none() && is_single(&pair.right) {
            // Without those characters that some token joins to what is behind them, or an added one begins or ends with.
            let joining = joining();
            if joining.by_pairs {
                pair.left.difference(&joined_to(joining, added, &pair.right));
                found = if pair.left.ranges().is_empty() { None } else { safe(&pair) };
            }
        }
        for alphabet in [STABLE, r"[\x00-\x7F]"] {
            if found.is_none() {
                pair.left.intersect(&class(alphabet));
                pair.right.intersect(&class(alphabet));
                found =
                    if pair.left.ranges().is_empty() || pair.right.ranges().is_empty() { None } else { safe(&pair) };
            }
        }
        if let Some(drops_space) = found {
            cuts.drops_space |= drops_space;
            cuts.pairs.push(pair);
        }
    }
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends_between(pattern: &str, left: &str, right: &str) -> Option<bool> {
        pattern_ends(pattern, &Pair { left: class(left), right: class(right) }).ok()
    }

    #[test]
    fn patterns_are_read() {
        assert_eq!(ends_between(GPT2, r"\p{L}", " "), Some(true));
        assert_eq!(ends_between(GPT2, r"\p{L}", "'"), Some(true));
        assert_eq!(ends_between(r"\s+(?!\S)", r"\p{L}", " "), Some(false));
        assert_eq!(ends_between("a b", "a", " "), None);
        assert_eq!(ends_between("(?:a ?)+", "a", " "), None);
        assert_eq!(ends_between("a?b? ?", "b", " "), None);
        assert_eq!(ends_between("a(?:b| )c", "a", " "), None);
        assert_eq!(ends_between("x", "a", " "), Some(false));
        assert_eq!(ends_between("aa", "a", " "), Some(false));
        assert_eq!(ends_between(r"(?<=a) b", "a", " "), None);
        assert_eq!(ends_between(r"a\b", "a", " "), None);
        assert_eq!(ends_between(r"a*", "a", " "), None);
        assert_eq!(ends_between(r"a+", "a", " "), Some(true));
        assert_eq!(ends_between(r"a{2,}", "a", " "), Some(false));
        assert_eq!(ends_between(r" ?[^(\s|[.,!?])]+", r"\p{L}", " "), Some(true));
    }
}
