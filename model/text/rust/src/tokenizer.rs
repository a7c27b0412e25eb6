//! A tokenizer as kvasir sees it: ids in and out, each token's bytes, and which tokens end a text.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokenizers::models::{ModelWrapper, TrainerWrapper};
use tokenizers::{
    AddedToken, DecoderWrapper, Model, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, Token,
    TokenizerImpl,
};

use crate::border::{invalid, Error, Result, CANCELLED, INTERNAL};
use crate::cuts::{self, Cuts, Joining};
use crate::direct::Direct;
use crate::spm::Spm;

/// The model proper. Shared, so that the two encoders below cost one vocabulary.
#[derive(Clone)]
pub struct SharedModel(pub Arc<AnyModel>);

pub enum AnyModel {
    Hf(ModelWrapper),
    Spm(Spm),
}

impl AnyModel {
    fn joining(&self) -> Joining<'_> {
        match self {
            AnyModel::Hf(ModelWrapper::BPE(m)) => Joining {
                by_pairs: !m.ignore_merges
                    && m.dropout.is_none()
                    && m.continuing_subword_prefix.is_none()
                    && m.end_of_word_suffix.is_none(),
                vocabulary: Box::new(m.get_vocab().into_keys()),
            },
            AnyModel::Hf(_) => Joining { by_pairs: false, vocabulary: Box::new(std::iter::empty()) },
            AnyModel::Spm(m) => Joining { by_pairs: true, vocabulary: Box::new(m.vocab().into_keys()) },
        }
    }
}

type HfResult<T> = tokenizers::Result<T>;

impl Model for SharedModel {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, text: &str) -> HfResult<Vec<Token>> {
        match &*self.0 {
            AnyModel::Hf(m) => m.tokenize(text),
            AnyModel::Spm(m) => Ok(m.tokenize(text)),
        }
    }
    fn token_to_id(&self, token: &str) -> Option<u32> {
        match &*self.0 {
            AnyModel::Hf(m) => m.token_to_id(token),
            AnyModel::Spm(m) => m.token_to_id(token),
        }
    }
    fn id_to_token(&self, id: u32) -> Option<String> {
        match &*self.0 {
            AnyModel::Hf(m) => m.id_to_token(id),
            AnyModel::Spm(m) => m.id_to_token(id),
        }
    }
    fn get_vocab(&self) -> HashMap<String, u32> {
        match &*self.0 {
            AnyModel::Hf(m) => m.get_vocab(),
            AnyModel::Spm(m) => m.vocab(),
        }
    }
    fn get_vocab_size(&self) -> usize {
        match &*self.0 {
            AnyModel::Hf(m) => m.get_vocab_size(),
            AnyModel::Spm(m) => m.len(),
        }
    }
    fn save(&self, _: &Path, _: Option<&str>) -> HfResult<Vec<PathBuf>> {
        Err("a loaded tokenizer is not saved".into())
    }
    fn get_trainer(&self) -> TrainerWrapper {
        unreachable!("kvasir trains no tokenizer")
    }
}

pub type Pipeline =
    TokenizerImpl<SharedModel, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// Bytes of all tokens in one piece; token i is [offsets[i], offsets[i + 1]).
#[derive(Default)]
pub struct Pieces {
    pub data: Vec<u8>,
    pub offsets: Vec<u32>,
}

impl Pieces {
    pub fn with_capacity(n: usize) -> Pieces {
        let mut offsets = Vec::with_capacity(n + 1);
        offsets.push(0);
        Pieces { data: Vec::with_capacity(n * 8), offsets }
    }
    pub fn push(&mut self, bytes: &[u8]) {
        self.data.extend_from_slice(bytes);
        self.offsets.push(self.data.len() as u32);
    }
    pub fn get(&self, i: usize) -> &[u8] {
        &self.data[self.offsets[i] as usize..self.offsets[i + 1] as usize]
    }
    pub fn len(&self) -> usize {
        self.offsets.len() - 1
    }
}

pub const SPECIAL: u8 = 1;
pub const NEVER_GENERATED: u8 = 2;

pub struct Tokenizer {
    special: Pipeline, // text such as <|im_end|> becomes its token
    plain: Pipeline,   // the same text stays text
    pub bytes: Pieces,
    pub text: Pieces,
    pub flags: Vec<u8>,
    pub bos: i32,
    pub end_of_generation: Vec<i32>,
    pub chat_template: String,
    pub strips_leading_space: bool,
    pub prefix: Vec<i32>, // what add_bos adds when the pipeline itself adds nothing (GGUF)
    pub suffix: Vec<i32>,
    cuts: Cuts,
    direct: Option<Direct>,
    around: Option<(Vec<u32>, Vec<u32>)>, // what the pipeline itself adds before a text and behind it, where that is known
}

/// What an encoding may cost, and whether it is wanted.
pub struct Limits<'a> {
    pub piece: usize, // bytes that are encoded at a time, where the text may be cut
    pub most: usize,  // tokens: with more it ends early
    pub stopped: &'a dyn Fn() -> bool,
    pub by_library: bool, // all of it: tests compare the direct way with it
}

/// A piece without a place to cut takes time and memory as a whole: some 100 bytes a byte.
const MOST_UNCUT: usize = 1 << 20;

impl Tokenizer {
    /// `merges`: the pairs of a vocabulary that has them, in the order in which they were learned.
    pub fn new<'a>(pipeline: Pipeline, merges: impl Iterator<Item = (&'a str, &'a str)> + Clone) -> Tokenizer {
        let direct = Direct::of(&pipeline, merges);
        Tokenizer::with(pipeline, direct).with_cuts()
    }

    /// Of a way that is not the pipeline's, which is what others are told: texts are never cut.
    pub fn of_direct(pipeline: Pipeline, direct: Direct) -> Tokenizer {
        let mut t = Tokenizer::with(pipeline, Some(direct));
        t.around = Some((Vec::new(), Vec::new()));
        t
    }

    fn with(mut pipeline: Pipeline, direct: Option<Direct>) -> Tokenizer {
        let special = pipeline.clone();
        pipeline.set_encode_special_tokens(true);
        Tokenizer {
            special,
            plain: pipeline,
            bytes: Pieces::with_capacity(0),
            text: Pieces::with_capacity(0),
            flags: Vec::new(),
            bos: -1,
            end_of_generation: Vec::new(),
            chat_template: String::new(),
            strips_leading_space: false,
            prefix: Vec::new(),
            suffix: Vec::new(),
            cuts: Cuts::default(),
            direct,
            around: None,
        }
    }

    fn with_cuts(mut self) -> Tokenizer {
        let json = |part: serde_json::Result<serde_json::Value>| part.unwrap_or_default();
        let added: Vec<AddedToken> =
            self.special.get_added_vocabulary().get_added_tokens_decoder().values().cloned().collect();
        let model = &self.special.get_model().0;
        self.cuts = cuts::find(
            &json(serde_json::to_value(self.special.get_normalizer())),
            &json(serde_json::to_value(self.special.get_pre_tokenizer())),
            &added,
            || model.joining(),
        );
        self.around = self.what_stands_around();
        self
    }

    fn what_stands_around(&self) -> Option<(Vec<u32>, Vec<u32>)> {
        let ids = |around| self.special.encode_fast("a", around).ok().map(|encoding| encoding.get_ids().to_vec());
        let (bare, whole) = (ids(false)?, ids(true)?);
        let mut places = (0..=whole.len().checked_sub(bare.len())?).filter(|&i| whole[i..].starts_with(&bare));
        let at = places.next()?;
        let ambiguous = bare.is_empty() || places.next().is_some();
        (!ambiguous).then(|| (whole[..at].to_vec(), whole[at + bare.len()..].to_vec()))
    }

    /// Texts take the direct way, which needs to know what the pipeline adds around them.
    pub fn goes_directly(&self) -> bool {
        self.direct.is_some() && self.around.is_some()
    }

    /// With more tokens than `limits.most` it ends there: what comes back is longer than that, and not the whole.
    pub fn encode(&self, text: &str, add_bos: bool, parse_special: bool, limits: &Limits) -> Result<Vec<i32>> {
        let way = Way {
            pipeline: if parse_special { &self.special } else { &self.plain },
            direct: self.direct.as_ref().filter(|_| !limits.by_library),
            special: parse_special,
        };
        let mut ids = Vec::new();
        if add_bos {
            ids.extend_from_slice(&self.prefix);
        }
        let in_pieces = way.direct.is_some() || text.len() > limits.piece && self.cuts.any();
        match self.around.as_ref().filter(|_| in_pieces) {
            Some((before, behind)) => {
                let around = if add_bos { (before.as_slice(), behind.as_slice()) } else { (&[][..], &[][..]) };
                ids.extend(around.0.iter().map(|&id| id as i32));
                self.encode_pieces(&way, text, limits, &mut ids)?;
                ids.extend(around.1.iter().map(|&id| id as i32));
            }
            None => way.encode_whole(text, add_bos, &mut ids)?,
        }
        if add_bos {
            ids.extend_from_slice(&self.suffix);
        }
        Ok(ids)
    }

    fn encode_pieces(&self, way: &Way, text: &str, limits: &Limits, ids: &mut Vec<i32>) -> Result<()> {
        let mut begin = 0;
        while begin < text.len() && ids.len() <= limits.most {
            if (limits.stopped)() {
                return Err(Error { code: CANCELLED, message: "nobody waits for the text's tokens".into() });
            }
            let cut = match text.len() - begin > limits.piece {
                true => self.cuts.next(text, begin + limits.piece, begin + MOST_UNCUT),
                false => None,
            };
            let (end, next) = cut.unwrap_or((text.len(), text.len()));
            way.encode_piece(&text[begin..end], ids)?;
            begin = next;
        }
        Ok(())
    }

    /// The whole as a tokenizer.json, for those who tokenize elsewhere.
    pub fn to_json(&self) -> Result<String> {
        let (model, undone) = match &*self.special.get_model().0 {
            AnyModel::Hf(model) => (
                serde_json::json!(model),
                serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                                   "use_regex": false}),
            ),
            AnyModel::Spm(model) => (model.to_json(), self.sentence_piece_decoder()),
        };
        // GGUF names no decoder, and what goes around a prompt beside the pipeline.
        let decoder = self.special.get_decoder().map_or(undone, |decoder| serde_json::json!(decoder));
        let around = match self.special.get_post_processor() {
            Some(processor) => serde_json::json!(processor),
            None => self.template_around(),
        };
        Ok(serde_json::json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": self.special.get_added_vocabulary(),
            "normalizer": self.special.get_normalizer(),
            "pre_tokenizer": self.special.get_pre_tokenizer(),
            "post_processor": around,
            "decoder": decoder,
            "model": model,
        })
        .to_string())
    }

    fn sentence_piece_decoder(&self) -> serde_json::Value {
        let mut steps = vec![
            serde_json::json!({"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}),
            serde_json::json!({"type": "ByteFallback"}),
            serde_json::json!({"type": "Fuse"}),
        ];
        if self.strips_leading_space {
            steps.push(serde_json::json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        serde_json::json!({"type": "Sequence", "decoders": steps})
    }

    fn template_around(&self) -> serde_json::Value {
        if self.prefix.is_empty() && self.suffix.is_empty() {
            return serde_json::Value::Null;
        }
        let text = |id: i32| String::from_utf8_lossy(self.text.get(id as usize)).into_owned();
        let special = |id: &i32| serde_json::json!({"SpecialToken": {"id": text(*id), "type_id": 0}});
        let sequence = |name: &str| serde_json::json!({"Sequence": {"id": name, "type_id": 0}});
        let around = |names: &[&str]| -> Vec<serde_json::Value> {
            let inside = names.iter().map(|name| sequence(name));
            self.prefix.iter().map(special).chain(inside).chain(self.suffix.iter().map(special)).collect()
        };
        let used: serde_json::Map<String, serde_json::Value> = self
            .prefix
            .iter()
            .chain(&self.suffix)
            .map(|&id| (text(id), serde_json::json!({"id": text(id), "ids": [id], "tokens": [text(id)]})))
            .collect();
        serde_json::json!({"type": "TemplateProcessing", "single": around(&["A"]), "pair": around(&["A", "B"]),
                           "special_tokens": used})
    }

    pub fn token_id(&self, text: &str) -> i32 {
        self.special.token_to_id(text).map_or(-1, |id| id as i32)
    }

    /// eos and its like: what the file names, then every special token that models use to end a turn.
    pub fn find_end_of_generation(&mut self, named: &[i32]) {
        const NAMES: [&str; 15] = [
            "<|im_end|>",
            "<|eot_id|>",
            "<|eom_id|>",
            "<|end|>",
            "<|end_of_text|>",
            "<|endoftext|>",
            "<|endofturn|>",
            "<end_of_turn>",
            "<turn|>",
            "<|tool_response>",
            "<EOT>",
            "<|return|>",
            "<|END_OF_TURN_TOKEN|>",
            "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
            "<eos>",
        ];
        let found = NAMES
            .iter()
            .map(|name| self.token_id(name))
            .filter(|&id| id >= 0 && self.flags.get(id as usize).is_some_and(|f| f & SPECIAL != 0));
        let mut all: Vec<i32> = Vec::new();
        for id in named.iter().copied().chain(found) {
            if id >= 0 && (id as usize) < self.flags.len() && !all.contains(&id) {
                all.push(id);
            }
        }
        self.end_of_generation = all;
    }
}

/// How the parts of one text are encoded.
struct Way<'a> {
    pipeline: &'a Pipeline,
    direct: Option<&'a Direct>,
    special: bool,
}

impl Way<'_> {
    fn encode_piece(&self, text: &str, ids: &mut Vec<i32>) -> Result<()> {
        match self.direct {
            Some(direct) if text.len() <= MOST_UNCUT => {
                direct.encode(self.pipeline.get_model(), text, self.special, ids);
                Ok(())
            }
            _ => self.encode_whole(text, false, ids),
        }
    }

    fn encode_whole(&self, text: &str, add_bos: bool, ids: &mut Vec<i32>) -> Result<()> {
        if text.len() > MOST_UNCUT {
            return Err(invalid(format!(
                "the text has more than {MOST_UNCUT} bytes without a place where it may be cut, such as a space behind a word"
            )));
        }
        let encoding = self
            .pipeline
            .encode_fast(text, add_bos)
            .map_err(|e| Error { code: INTERNAL, message: format!("the text could not be tokenized: {e}") })?;
        ids.extend(encoding.get_ids().iter().map(|&id| id as i32));
        Ok(())
    }
}

/// An added token matched as it is written, in no other form.
pub fn verbatim(content: &str, special: bool) -> AddedToken {
    AddedToken::from(content, special).normalized(false)
}
