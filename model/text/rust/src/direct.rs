//! The way of nearly all texts of byte-level models: added tokens, normalization, pieces and merges one after the other,
//! to the ids that the library makes, without its record of which characters each came from.

use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::Value;
use tokenizers::{AddedToken, Model, ModelWrapper};
use unicode_normalization_alignments::{is_nfc_quick, IsNormalized, UnicodeNormalization};

use crate::json::BYTES_AS_WRITTEN;
use crate::merges::{Merges, Scratch};
use crate::tokenizer::{AnyModel, Pipeline};
use crate::words::Words;

pub struct Direct {
    raw: AddedTokens,        // matched in a text as it came
    normalized: AddedTokens, // and in one that is normalized
    nfc: bool,
    words: Words,
    merges: Merges,
    whole_pieces: bool, // a piece that is a token as it stands is not merged up to it
}

struct AddedTokens {
    find: Option<AhoCorasick>,
    tokens: Vec<(i32, AddedToken)>,
}

enum Part<'a> {
    Text(&'a str),
    Token(i32),
}

impl AddedTokens {
    fn new(tokens: Vec<(i32, AddedToken)>) -> Option<AddedTokens> {
        let white = |c: char| c.is_whitespace();
        if tokens.iter().any(|(_, t)| {
            t.single_word || (t.lstrip || t.rstrip) && (t.content.starts_with(white) || t.content.ends_with(white))
        }) {
            return None;
        }
        let find = match tokens.is_empty() {
            true => None,
            false => {
                let texts = tokens.iter().map(|(_, t)| &t.content);
                Some(AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(texts).ok()?)
            }
        };
        Some(AddedTokens { find, tokens })
    }

    /// `special`: those that are special are looked for too.
    fn each(&self, text: &str, special: bool, found: &mut dyn FnMut(Part)) {
        let mut begin = 0;
        for m in self.find.iter().flat_map(|find| find.find_iter(text)) {
            let (id, token) = &self.tokens[m.pattern().as_usize()];
            if token.special && !special {
                continue;
            }
            let start = if token.lstrip { text[..m.start()].trim_end().len().max(begin) } else { m.start() };
            if begin < start {
                found(Part::Text(&text[begin..start]));
            }
            found(Part::Token(*id));
            begin = if token.rstrip { text.len() - text[m.end()..].trim_start().len() } else { m.end() };
        }
        if begin < text.len() {
            found(Part::Text(&text[begin..]));
        }
    }
}

impl Direct {
    /// None where some part of the pipeline is of another kind.
    pub fn of<'a>(pipeline: &Pipeline, pairs: impl Iterator<Item = (&'a str, &'a str)>) -> Option<Direct> {
        let AnyModel::Hf(ModelWrapper::BPE(model)) = &*pipeline.get_model().0 else {
            return None;
        };
        let affixes = [&model.continuing_subword_prefix, &model.end_of_word_suffix];
        if model.dropout.is_some_and(|p| p > 0.0) || affixes.iter().any(|a| a.as_ref().is_some_and(|a| !a.is_empty())) {
            return None;
        }
        let nfc = match serde_json::to_value(pipeline.get_normalizer()).ok()? {
            Value::Null => false,
            normalizer if normalizer["type"] == "NFC" => true,
            _ => return None,
        };
        let words = Words::of(&serde_json::to_value(pipeline.get_pre_tokenizer()).ok()?)?;
        let added = pipeline.get_added_vocabulary().get_added_tokens_decoder();
        let of_kind = |normalized: bool| {
            let all = added.iter().filter(|(_, t)| t.normalized == normalized);
            all.map(|(&id, t)| (id as i32, t.clone())).collect::<Vec<_>>()
        };
        let normalized = of_kind(true);
        if nfc && normalized.iter().any(|(_, t)| !t.content.is_ascii()) {
            return None;
        }
        let merges = Merges::new(model, &BYTES_AS_WRITTEN, pairs)?;
        if !merges.complete() && (model.unk_token.is_some() || model.byte_fallback) {
            return None;
        }
        Some(Direct {
            raw: AddedTokens::new(of_kind(false))?,
            normalized: AddedTokens::new(normalized)?,
            nfc,
            words,
            merges,
            whole_pieces: model.ignore_merges,
        })
    }

    pub fn encode(&self, model: &impl Model, text: &str, special: bool, ids: &mut Vec<i32>) {
        let mut scratch = Scratch::default();
        let mut written = String::new();
        self.raw.each(text, special, &mut |part| match part {
            Part::Token(id) => ids.push(id),
            Part::Text(part) => self.normalize(part, &mut |part| {
                self.normalized.each(part, special, &mut |part| match part {
                    Part::Token(id) => ids.push(id),
                    Part::Text(part) => self.words.each(part, &mut |piece| match self
                        .whole_pieces
                        .then(|| as_one(model, piece, &mut written))
                        .flatten()
                    {
                        Some(id) => ids.push(id),
                        None => self.merges.merge(piece.as_bytes(), &mut scratch, ids),
                    }),
                })
            }),
        });
    }

    fn normalize(&self, text: &str, with: &mut dyn FnMut(&str)) {
        if !self.nfc || text.is_ascii() || matches!(is_nfc_quick(text.chars()), IsNormalized::Yes) {
            return with(text);
        }
        with(&text.nfc().map(|(c, _)| c).collect::<String>())
    }
}

fn as_one(model: &impl Model, piece: &str, written: &mut String) -> Option<i32> {
    written.clear();
    written.extend(piece.bytes().map(|byte| BYTES_AS_WRITTEN[byte as usize]));
    model.token_to_id(written).map(|id| id as i32)
}
