//! A tokenizer from the vocabulary inside a GGUF file.

use std::collections::HashSet;
use std::sync::Arc;

use tokenizers::models::bpe::BPE;
use tokenizers::models::unigram::Unigram;
use tokenizers::{AddedToken, Model, ModelWrapper};

use crate::border::{invalid, slice, Error, Result, Str, UNIMPLEMENTED};
use crate::charsmap::Charsmap;
use crate::direct::Direct;
use crate::json::{byte_level_bytes, spm_bytes};
use crate::pretok;
use crate::spm::Spm;
use crate::tokenizer::{verbatim, AnyModel, Pieces, Pipeline, SharedModel, Tokenizer, NEVER_GENERATED, SPECIAL};

#[repr(C)]
pub struct Vocab {
    model: Str,
    pre: Str,
    chat_template: Str,
    tokens: *const Str,
    scores: *const f32,
    types: *const i32,
    merges: *const Str,
    n_tokens: usize,
    n_scores: usize,
    n_types: usize,
    n_merges: usize,
    bos: i32,
    eos: i32,
    unk: i32,
    eot: i32,
    pad: i32,
    add_bos: u8,
    add_eos: u8,
    add_space_prefix: u8,
    remove_extra_spaces: u8,
    charsmap: *const u8,
    n_charsmap: usize,
}

// Token types as GGUF numbers them.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// Unigrams of a SentencePiece file: read as SentencePiece itself reads a text.
const SENTENCE_PIECE: &str = "sentencepiece";

const MAX_TOKENS: usize = 4_000_000;

/// # Safety
/// Every pointer of `v` is readable for its length.
pub unsafe fn load(v: &Vocab) -> Result<Tokenizer> {
    let n = v.n_tokens;
    if n == 0 || n > MAX_TOKENS {
        return Err(invalid(format!("tokenizer.ggml.tokens has {n} entries; it must have 1 to {MAX_TOKENS}")));
    }
    for (name, len) in [("scores", v.n_scores), ("token_type", v.n_types)] {
        if len != 0 && len != n {
            return Err(invalid(format!("tokenizer.ggml.{name} has {len} entries but there are {n} tokens")));
        }
    }
    let mut tokens = Vec::with_capacity(n);
    for (i, token) in slice(v.tokens, n).iter().enumerate() {
        tokens.push(token.text(&format!("tokenizer.ggml.tokens[{i}]"))?.to_string());
    }
    let types: Vec<i32> = match v.n_types {
        0 => vec![NORMAL; n],
        _ => slice(v.types, n).to_vec(),
    };
    for (name, id) in [("bos", v.bos), ("eos", v.eos), ("unknown", v.unk), ("eot", v.eot), ("padding", v.pad)] {
        if id >= n as i32 {
            return Err(invalid(format!("tokenizer.ggml.{name}_token_id is {id} but there are {n} tokens")));
        }
    }

    let name = v.model.text("tokenizer.ggml.model")?;
    let space_prefix = v.add_space_prefix != 0;
    let mut pipeline;
    let mut merges = Vec::new();
    match name {
        "gpt2" => {
            let rule = pretok::find(v.pre.text("tokenizer.ggml.pre")?)?;
            merges = read_merges(v, &tokens)?;
            pipeline = Pipeline::new(merged_model(&tokens, &merges, rule.ignore_merges, -1)?);
            if rule.nfc {
                let _ = pipeline.with_normalizer(Some(pretok::nfc()?));
            }
            pipeline.with_pre_tokenizer(Some(pretok::pre_tokenizer(rule)?));
        }
        // Gemma 4's: merges as byte-level BPE has them, of characters; what is left over falls to bytes.
        "gemma4" => {
            merges = read_merges(v, &tokens)?;
            pipeline = Pipeline::new(merged_model(&tokens, &merges, false, v.unk)?);
            let _ = pipeline.with_normalizer(Some(pretok::sentence_piece(false)?));
        }
        "llama" => {
            if v.n_scores == 0 {
                return Err(invalid("tokenizer.ggml.scores is missing; a \"llama\" vocabulary needs it"));
            }
            let mergeable = types.iter().map(|&t| matches!(t, NORMAL | USER_DEFINED | UNUSED)).collect();
            let spm = Spm::new(tokens.clone(), slice(v.scores, n).to_vec(), mergeable, v.unk);
            pipeline = Pipeline::new(SharedModel(Arc::new(AnyModel::Spm(spm))));
            let _ = pipeline.with_normalizer(Some(pretok::sentence_piece(space_prefix)?));
        }
        // Unigrams, of which a text's likeliest are taken. (T5's models read no more than one space between words.)
        "t5" | SENTENCE_PIECE => {
            if v.n_scores == 0 {
                return Err(invalid("tokenizer.ggml.scores is missing; a \"t5\" vocabulary needs it"));
            }
            let unknown = usize::try_from(v.unk).map_err(|_| {
                invalid("tokenizer.ggml.unknown_token_id is missing; a \"t5\" vocabulary needs it")
            })?;
            let pieces = tokens.iter().cloned().zip(slice(v.scores, n).iter().map(|&s| f64::from(s))).collect();
            let model = Unigram::from(pieces, Some(unknown), types.contains(&BYTE))
                .map_err(|e| invalid(format!("tokenizer.ggml.tokens are no unigrams: {e}")))?;
            pipeline = Pipeline::new(SharedModel(Arc::new(AnyModel::Hf(ModelWrapper::Unigram(model)))));
            let steps = pretok::unigram(slice(v.charsmap, v.n_charsmap), v.remove_extra_spaces != 0, space_prefix)?;
            let _ = pipeline.with_normalizer(steps.normalizer);
            pipeline.with_pre_tokenizer(steps.pre_tokenizer);
            pipeline.with_decoder(Some(steps.decoder));
        }
        other => {
            return Err(Error {
                code: UNIMPLEMENTED,
                message: format!("tokenizer.ggml.model is \"{other}\"; this build knows \"gpt2\" (byte-level BPE), \"llama\" (SentencePiece), \"t5\" (unigrams) and \"gemma4\""),
            })
        }
    }

    let is_special = |i: usize| matches!(types[i], CONTROL | UNKNOWN);
    let added: Vec<AddedToken> = (0..n)
        .filter(|&i| is_special(i) || types[i] == USER_DEFINED)
        // Of two tokens with one text the model knows the one; the other can only be generated.
        .filter(|&i| pipeline.get_model().token_to_id(&tokens[i]) == Some(i as u32))
        .map(|i| verbatim(&tokens[i], is_special(i)))
        .collect();
    pipeline.add_tokens(added).map_err(|e| invalid(format!("the special tokens cannot be matched: {e}")))?;

    let mut t = match name {
        SENTENCE_PIECE => {
            let charsmap = Charsmap::new(slice(v.charsmap, v.n_charsmap), v.remove_extra_spaces != 0, space_prefix)?;
            let direct = Direct::of_sentence_piece(&pipeline, charsmap, |id| types[id] == NORMAL)
                .ok_or_else(|| invalid("the unigrams have no token for each byte, or no unknown one"))?;
            Tokenizer::of_direct(pipeline, direct)
        }
        _ => Tokenizer::new(pipeline, merges.iter().map(|(a, b)| (a.as_str(), b.as_str()))),
    };
    t.bytes = Pieces::with_capacity(n);
    t.text = Pieces::with_capacity(n);
    for (i, token) in tokens.iter().enumerate() {
        t.text.push(token.as_bytes());
        match (types[i], name) {
            (CONTROL | UNKNOWN | USER_DEFINED, "gpt2") => t.bytes.push(token.as_bytes()),
            (NORMAL | UNUSED | BYTE, "gpt2") => t.bytes.push(&byte_level_bytes(token)),
            (CONTROL | UNKNOWN, _) => t.bytes.push(token.as_bytes()),
            _ => t.bytes.push(&spm_bytes(token)),
        }
        let never = if types[i] == UNUSED { NEVER_GENERATED } else { 0 };
        t.flags.push(never | if is_special(i) { SPECIAL } else { 0 });
    }
    t.bos = v.bos;
    t.find_end_of_generation(&[v.eos, v.eot]);
    t.chat_template = v.chat_template.text("tokenizer.chat_template")?.to_string();
    t.strips_leading_space = matches!(name, "llama" | "t5" | SENTENCE_PIECE) && space_prefix;
    if v.add_bos != 0 && v.bos >= 0 {
        t.prefix.push(v.bos);
    }
    if v.add_eos != 0 && v.eos >= 0 {
        t.suffix.push(v.eos);
    }
    Ok(t)
}

unsafe fn read_merges(v: &Vocab, tokens: &[String]) -> Result<Vec<(String, String)>> {
    if v.n_merges == 0 && tokens.len() > 300 {
        return Err(invalid("tokenizer.ggml.merges is missing; this kind of vocabulary needs it"));
    }
    let known: HashSet<&str> = tokens.iter().map(String::as_str).collect();
    let mut merges = Vec::with_capacity(v.n_merges);
    let mut union = String::new();
    for (i, merge) in slice(v.merges, v.n_merges).iter().enumerate() {
        let merge = merge.text(&format!("tokenizer.ggml.merges[{i}]"))?;
        // The first half may itself begin with a space in old files, so look from the second character.
        let second = merge.char_indices().nth(1).map_or(merge.len(), |(at, _)| at);
        let Some(space) = merge[second..].find(' ').map(|at| at + second) else {
            return Err(invalid(format!(
                "tokenizer.ggml.merges[{i}] is {merge:?}; it must be two tokens with a space between"
            )));
        };
        let (a, b) = (&merge[..space], &merge[space + 1..]);
        union.clear();
        union.push_str(a);
        union.push_str(b);
        for token in [a, b, union.as_str()] {
            if !known.contains(token) {
                return Err(invalid(format!(
                    "tokenizer.ggml.merges[{i}] names {token:?}, which is not in the vocabulary"
                )));
            }
        }
        merges.push((a.to_string(), b.to_string()));
    }
    Ok(merges)
}

/// `unknown`: the token of what is in no token, after the tokens of its bytes; -1: the vocabulary is of bytes.
fn merged_model(
    tokens: &[String],
    merges: &[(String, String)],
    ignore_merges: bool,
    unknown: i32,
) -> Result<SharedModel> {
    let mut vocab: ahash::AHashMap<String, u32> = ahash::AHashMap::with_capacity(tokens.len());
    for (i, token) in tokens.iter().enumerate() {
        vocab.entry(token.clone()).or_insert(i as u32);
    }
    let mut builder = BPE::builder()
        .vocab_and_merges(vocab, merges.to_vec())
        .ignore_merges(ignore_merges);
    if unknown >= 0 {
        builder = builder.unk_token(tokens[unknown as usize].clone()).fuse_unk(true).byte_fallback(true);
    }
    let bpe = builder
        .build()
        .map_err(|e| invalid(format!("the vocabulary and its merges do not fit: {e}")))?;
    Ok(SharedModel(Arc::new(AnyModel::Hf(ModelWrapper::BPE(bpe)))))
}
