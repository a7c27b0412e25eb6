//! The way of nearly all texts: added tokens, normalization, pieces and their tokens one after the other, to the ids that
//! the library makes, without its record of which characters each came from.

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::{AddedToken, Model, ModelWrapper, NormalizedString, Normalizer};

use crate::chars::Chars;
use crate::charsmap::Charsmap;
use crate::json::BYTES_AS_WRITTEN;
use crate::merges::{Merges, Scratch};
use crate::normal::Normal;
use crate::tokenizer::{AnyModel, Pipeline};
use crate::unigrams::{Paths, Unigrams};
use crate::words::Words;

pub struct Direct {
    raw: AddedTokens,        // matched in a text as it came
    normalized: AddedTokens, // and in one that is normalized
    normal: Normal,
    words: Words,
    kind: Kind,
}

enum Kind {
    /// `whole_pieces`: a piece that is a token as it stands is not merged up to it.
    Bytes {
        merges: Merges,
        whole_pieces: bool,
    },
    Chars(Chars),
    Unigrams(Unigrams),
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
            t.content.is_empty()
                || t.single_word
                || (t.lstrip || t.rstrip) && (t.content.starts_with(white) || t.content.ends_with(white))
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

    /// `special`: those that are special are looked for too. With each part, whether the text begins with it.
    fn each(&self, text: &str, special: bool, found: &mut dyn FnMut(Part, bool)) {
        let mut begin = 0;
        for m in self.find.iter().flat_map(|find| find.find_iter(text)) {
            let (id, token) = &self.tokens[m.pattern().as_usize()];
            if token.special && !special {
                continue;
            }
            let start = if token.lstrip { text[..m.start()].trim_end().len().max(begin) } else { m.start() };
            if begin < start {
                found(Part::Text(&text[begin..start]), begin == 0);
            }
            found(Part::Token(*id), start == 0);
            begin = if token.rstrip { text.len() - text[m.end()..].trim_start().len() } else { m.end() };
        }
        if begin < text.len() {
            found(Part::Text(&text[begin..]), begin == 0);
        }
    }
}

impl Direct {
    /// None where some part of the pipeline is of another kind.
    pub fn of<'a>(pipeline: &Pipeline, pairs: impl Iterator<Item = (&'a str, &'a str)> + Clone) -> Option<Direct> {
        let normal = Normal::of(pipeline.get_normalizer())?;
        let pre_tokenizer = serde_json::to_value(pipeline.get_pre_tokenizer()).ok()?;
        let (words, kind) = match Words::of_bytes(&pre_tokenizer) {
            Some(words) => (words, of_bytes(pipeline, pairs)?),
            None => (Words::of_chars(&pre_tokenizer, normal.moves_the_beginning())?, of_chars(pipeline, pairs)?),
        };
        let added = pipeline.get_added_vocabulary().get_added_tokens_decoder();
        let of_kind = |normalized: bool| {
            let all = added.iter().filter(move |(_, t)| t.normalized == normalized);
            all.map(|(&id, t)| (id as i32, t.clone()))
        };
        let as_normalized = |(id, mut token): (i32, AddedToken)| {
            let mut content = NormalizedString::from(token.content.as_str());
            pipeline.get_normalizer().map_or(Ok(()), |n| n.normalize(&mut content)).ok()?;
            token.content = content.get().to_string();
            Some((id, token))
        };
        Some(Direct {
            raw: AddedTokens::new(of_kind(false).collect())?,
            normalized: AddedTokens::new(of_kind(true).map(as_normalized).collect::<Option<Vec<_>>>()?)?,
            normal,
            words,
            kind,
        })
    }

    /// SentencePiece's own way, of a vocabulary of unigrams. `has`: whether a text may have this token.
    pub fn of_sentence_piece(pipeline: &Pipeline, charsmap: Charsmap, has: impl Fn(usize) -> bool) -> Option<Direct> {
        let AnyModel::Hf(ModelWrapper::Unigram(model)) = &*pipeline.get_model().0 else {
            return None;
        };
        let added = pipeline.get_added_vocabulary().get_added_tokens_decoder();
        Some(Direct {
            raw: AddedTokens::new(added.iter().map(|(&id, t)| (id as i32, t.clone())).collect())?,
            normalized: AddedTokens::new(Vec::new())?,
            normal: Normal::of_sentence_piece(charsmap),
            words: Words::whole(),
            kind: Kind::Unigrams(Unigrams::of_those(model, has)?),
        })
    }

    pub fn encode(&self, model: &impl Model, text: &str, special: bool, ids: &mut Vec<i32>) {
        let mut work = Work::default();
        self.raw.each(text, special, &mut |part, first| match part {
            Part::Token(id) => ids.push(id),
            Part::Text(part) => {
                self.normalized.each(&self.normal.apply(part), special, &mut |part, still| match part {
                    Part::Token(id) => ids.push(id),
                    Part::Text(part) => self
                        .words
                        .each(part, first && still, &mut |piece| self.kind.encode(model, piece, &mut work, ids)),
                })
            }
        });
    }
}

fn of_bytes<'a>(pipeline: &Pipeline, pairs: impl Iterator<Item = (&'a str, &'a str)>) -> Option<Kind> {
    let AnyModel::Hf(ModelWrapper::BPE(model)) = &*pipeline.get_model().0 else {
        return None;
    };
    let affixes = [&model.continuing_subword_prefix, &model.end_of_word_suffix];
    if model.dropout.is_some_and(|p| p > 0.0) || affixes.iter().any(|a| a.as_ref().is_some_and(|a| !a.is_empty())) {
        return None;
    }
    let merges = Merges::new(model, &BYTES_AS_WRITTEN, pairs)?;
    if !merges.complete() && (model.unk_token.is_some() || model.byte_fallback) {
        return None;
    }
    Some(Kind::Bytes { merges, whole_pieces: model.ignore_merges })
}

fn of_chars<'a>(pipeline: &Pipeline, pairs: impl Iterator<Item = (&'a str, &'a str)> + Clone) -> Option<Kind> {
    match &*pipeline.get_model().0 {
        AnyModel::Spm(model) => Some(Kind::Chars(Chars::of_scores(model))),
        AnyModel::Hf(ModelWrapper::BPE(model)) => Some(Kind::Chars(Chars::of_merges(model, pairs)?)),
        AnyModel::Hf(ModelWrapper::Unigram(model)) => Some(Kind::Unigrams(Unigrams::of(model)?)),
        AnyModel::Hf(_) => None,
    }
}

/// What encoding needs beside its result, kept between pieces.
#[derive(Default)]
struct Work {
    scratch: Scratch,
    paths: Paths,
    written: String,
}

impl Kind {
    fn encode(&self, model: &impl Model, piece: &str, work: &mut Work, ids: &mut Vec<i32>) {
        match self {
            Kind::Chars(chars) => chars.encode(piece, &mut work.scratch, ids),
            Kind::Unigrams(unigrams) => unigrams.encode(piece, &mut work.paths, ids),
            Kind::Bytes { merges, whole_pieces } => {
                match whole_pieces.then(|| as_one(model, piece, &mut work.written)).flatten() {
                    Some(id) => ids.push(id),
                    None => merges.merge(piece.as_bytes(), &mut work.scratch, ids),
                }
            }
        }
    }
}

fn as_one(model: &impl Model, piece: &str, written: &mut String) -> Option<i32> {
    written.clear();
    written.extend(piece.bytes().map(|byte| BYTES_AS_WRITTEN[byte as usize]));
    model.token_to_id(written).map(|id| id as i32)
}
