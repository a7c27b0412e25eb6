//! What a normalizer makes of a text, without the library's record of where each character came from: steps of the kinds
//! that models have.

use std::borrow::Cow;

use serde_json::Value;
use tokenizers::normalizers::Precompiled;
use tokenizers::NormalizerWrapper;
use unicode_normalization_alignments::{is_nfc_quick, IsNormalized, UnicodeNormalization};

use crate::charsmap::Charsmap;

enum Step {
    Nfc,
    Before(String),
    Replace(String, String),
    OneSpace, // of many
    Strip { left: bool, right: bool },
    Table { by: Precompiled, ascii: Vec<Option<String>> },
    SentencePiece(Charsmap),
}

#[derive(Default)]
pub struct Normal {
    steps: Vec<Step>,
}

impl Normal {
    /// None where some step is of another kind.
    pub fn of(normalizer: Option<&NormalizerWrapper>) -> Option<Normal> {
        let mut normal = Normal::default();
        normalizer.map_or(Some(()), |n| normal.add(n))?;
        Some(normal)
    }

    pub fn of_sentence_piece(charsmap: Charsmap) -> Normal {
        Normal { steps: vec![Step::SentencePiece(charsmap)] }
    }

    fn add(&mut self, normalizer: &NormalizerWrapper) -> Option<()> {
        self.steps.push(match normalizer {
            NormalizerWrapper::Sequence(all) => return all.as_ref().iter().try_for_each(|one| self.add(one)),
            NormalizerWrapper::NFC(_) => Step::Nfc,
            NormalizerWrapper::Prepend(p) => Step::Before(p.prepend.clone()),
            NormalizerWrapper::StripNormalizer(s) => Step::Strip { left: s.strip_left, right: s.strip_right },
            NormalizerWrapper::Replace(r) => replace(&serde_json::to_value(r).ok()?)?,
            NormalizerWrapper::Precompiled(by) => {
                let ascii = (0..128u8).map(|c| by.transform((c as char).encode_utf8(&mut [0])).map(String::from));
                Step::Table { by: by.clone(), ascii: ascii.collect() }
            }
            _ => return None,
        });
        Some(())
    }

    /// Whether a text's first character may stand for others than the first that came.
    pub fn moves_the_beginning(&self) -> bool {
        self.steps.iter().any(|step| matches!(step, Step::OneSpace | Step::Strip { .. } | Step::Table { .. }))
    }

    pub fn apply<'a>(&self, text: &'a str) -> Cow<'a, str> {
        self.steps.iter().fold(Cow::Borrowed(text), |text, step| match step.apply(&text) {
            Some(made) => Cow::Owned(made),
            None => text,
        })
    }
}

fn replace(step: &Value) -> Option<Step> {
    let new = step["content"].as_str()?;
    match (step["pattern"]["String"].as_str(), step["pattern"]["Regex"].as_str()) {
        (Some(old), _) if !old.is_empty() => Some(Step::Replace(old.to_string(), new.to_string())),
        (_, Some(" {2,}")) if new == " " => Some(Step::OneSpace),
        _ => None,
    }
}

impl Step {
    /// None: the text as it is.
    fn apply(&self, text: &str) -> Option<String> {
        match self {
            Step::Nfc if text.is_ascii() || matches!(is_nfc_quick(text.chars()), IsNormalized::Yes) => None,
            Step::Nfc => Some(text.nfc().map(|(c, _)| c).collect()),
            Step::Before(_) if text.is_empty() => None,
            Step::Before(what) => Some(format!("{what}{text}")),
            Step::Replace(old, new) => Some(text.replace(old.as_str(), new)),
            Step::OneSpace => Some(one_space(text)),
            Step::Strip { left, right } => {
                let text = if *left { text.trim_start() } else { text };
                Some(if *right { text.trim_end() } else { text }.to_string())
            }
            Step::Table { by, ascii } => Some(by_table(text, by, ascii)),
            Step::SentencePiece(charsmap) => Some(charsmap.apply(text)),
        }
    }
}

fn one_space(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("  ") {
        out.push_str(&rest[..=at]);
        rest = rest[at..].trim_start_matches(' ');
    }
    out + rest
}

/// The table is asked for clusters of characters that belong together. Between two of ASCII one always ends, but for the
/// break of a line in two.
fn by_table(text: &str, by: &Precompiled, ascii: &[Option<String>]) -> String {
    let bytes = text.as_bytes();
    let ends = |at: usize| at >= bytes.len() || bytes[at - 1].max(bytes[at]) < 128 && &bytes[at - 1..=at] != b"\r\n";
    let mut out = String::with_capacity(text.len());
    let mut begin = 0;
    for at in 1..=bytes.len() {
        if !ends(at) {
            continue;
        }
        match &bytes[begin..at] {
            &[c] => match &ascii[c as usize] {
                Some(made) => out.push_str(made),
                None => out.push(c as char),
            },
            _ => out.push_str(&by.normalize_string(&text[begin..at])),
        }
        begin = at;
    }
    out
}
