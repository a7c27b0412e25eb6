//! A tokenizer from Hugging Face's tokenizer.json, and what a token's text means in bytes.

use std::sync::{Arc, LazyLock};

use serde_json::Value;

use crate::border::{invalid, Error, Result, UNIMPLEMENTED};
use crate::tokenizer::{AnyModel, Pieces, Pipeline, SharedModel, Tokenizer, SPECIAL};

const MAX_ID: u32 = 8_000_000;
const MAX_GROWTH: f64 = 64.0;

/// The character that stands for each byte in a byte-level vocabulary.
pub static BYTES_AS_WRITTEN: LazyLock<[char; 256]> = LazyLock::new(|| {
    let mut spare = 0x100u32;
    std::array::from_fn(|byte| {
        let printable = matches!(byte as u8, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        spare += u32::from(!printable);
        char::from_u32(if printable { byte as u32 } else { spare - 1 }).unwrap()
    })
});

static BYTE_OF: LazyLock<std::collections::HashMap<char, u8>> =
    LazyLock::new(|| BYTES_AS_WRITTEN.iter().enumerate().map(|(byte, &c)| (c, byte as u8)).collect());

pub fn byte_level_bytes(token: &str) -> Vec<u8> {
    token
        .chars()
        .map(|c| BYTE_OF.get(&c).copied())
        .collect::<Option<Vec<u8>>>()
        .unwrap_or_else(|| token.as_bytes().to_vec())
}

/// SentencePiece: the lower block is a space, <0x0A> is a byte.
pub fn spm_bytes(token: &str) -> Vec<u8> {
    if let Some(hex) = token.strip_prefix("<0x").and_then(|t| t.strip_suffix('>')) {
        if hex.len() == 2 {
            if let Ok(byte) = u8::from_str_radix(hex, 16) {
                return vec![byte];
            }
        }
    }
    token.replace('\u{2581}', " ").into_bytes()
}

enum Style {
    ByteLevel,
    /// A token begins a word, unless it begins with this.
    WordPiece { prefix: String },
    SentencePiece { strips: bool },
}

fn style_of(decoder: &Value) -> Result<Style> {
    let empty = Vec::new();
    let parts: Vec<&Value> = match decoder["type"].as_str() {
        Some("Sequence") => decoder["decoders"].as_array().unwrap_or(&empty).iter().collect(),
        Some(_) => vec![decoder],
        None => Vec::new(),
    };
    let find = |kind: &str| parts.iter().copied().find(|p| p["type"].as_str() == Some(kind));
    if find("ByteLevel").is_some() {
        return Ok(Style::ByteLevel);
    }
    if let Some(w) = find("WordPiece") {
        return Ok(Style::WordPiece { prefix: w["prefix"].as_str().unwrap_or("##").to_string() });
    }
    if let Some(m) = find("Metaspace") {
        let never = m["prepend_scheme"].as_str() == Some("never") || m["add_prefix_space"].as_bool() == Some(false);
        return Ok(Style::SentencePiece { strips: !never });
    }
    if find("Replace").is_some() || find("ByteFallback").is_some() {
        let strips = find("Strip").is_some_and(|s| s["start"].as_u64().unwrap_or(0) > 0);
        return Ok(Style::SentencePiece { strips });
    }
    let kinds: Vec<&str> = parts.iter().filter_map(|p| p["type"].as_str()).collect();
    Err(Error {
        code: UNIMPLEMENTED,
        message: format!(
            "tokenizer.json: decoder [{}] is not one this build knows (ByteLevel, WordPiece, Metaspace, Replace with ByteFallback)",
            kinds.join(", ")
        ),
    })
}

/// tokenizer_config.json gives a token as text or as {"content": text}.
fn named_token(config: &Value, key: &str) -> Option<String> {
    let v = &config[key];
    v.as_str().or_else(|| v["content"].as_str()).map(String::from)
}

fn chat_template(config: &Value) -> String {
    match &config["chat_template"] {
        Value::String(s) => s.clone(),
        Value::Array(named) => named
            .iter()
            .find(|t| t["name"].as_str() == Some("default"))
            .or(named.first())
            .and_then(|t| t["template"].as_str())
            .unwrap_or_default()
            .to_string(),
        _ => String::new(),
    }
}

/// How many times longer a normalizer may make a text, by what it replaces: others add a prefix, or change characters.
fn growth(normalizer: &Value) -> f64 {
    let length = |v: &Value| v.as_str().map(str::len);
    match normalizer["type"].as_str() {
        Some("Sequence") => normalizer["normalizers"].as_array().map_or(1.0, |all| all.iter().map(growth).product()),
        Some("Replace") => {
            // A regular expression may match nothing, between all characters.
            let old = length(&normalizer["pattern"]["String"]).filter(|&n| n > 0);
            let new = length(&normalizer["content"]).unwrap_or(0);
            old.map_or((new + 1) as f64, |old| new as f64 / old as f64).max(1.0)
        }
        // A space before and behind each character of three bytes.
        Some("BertNormalizer") => 2.0,
        _ => 1.0,
    }
}

/// What is learned first stands first; as pairs, or as a text with a space between.
#[derive(serde::Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair(String, String),
    Text(String),
}

impl Merge {
    fn pair(&self) -> Option<(&str, &str)> {
        match self {
            Merge::Pair(a, b) => Some((a, b)),
            Merge::Text(text) => text.split_once(' ').filter(|(_, b)| !b.contains(' ')),
        }
    }
}

/// None where there are none, or some cannot be read.
fn merges(json: &str) -> Option<Vec<Merge>> {
    #[derive(serde::Deserialize)]
    struct Model {
        merges: Vec<Merge>,
    }
    #[derive(serde::Deserialize)]
    struct File {
        model: Model,
    }
    let read = serde_json::from_str::<File>(json).ok()?.model.merges;
    read.iter().all(|merge| merge.pair().is_some()).then_some(read)
}

pub fn load(json: &str, config_json: &str) -> Result<Tokenizer> {
    let full: tokenizers::Tokenizer =
        serde_json::from_str(json).map_err(|e| invalid(format!("tokenizer.json cannot be read: {e}")))?;
    let config: Value = if config_json.trim().is_empty() {
        Value::Null
    } else {
        serde_json::from_str(config_json).map_err(|e| invalid(format!("tokenizer_config.json cannot be read: {e}")))?
    };
    let normalizer = serde_json::to_value(full.get_normalizer()).unwrap_or(Value::Null);
    if growth(&normalizer) > MAX_GROWTH {
        return Err(invalid(format!(
            "tokenizer.json: its normalizer may make a text more than {MAX_GROWTH} times as long"
        )));
    }
    let decoder = serde_json::to_value(full.get_decoder()).unwrap_or(Value::Null);
    let style = style_of(&decoder)?;
    let added = full.get_added_vocabulary().clone();
    let max_id = full.get_vocab(true).into_values().max().unwrap_or(0);
    if max_id > MAX_ID {
        return Err(invalid(format!("tokenizer.json: the highest token id is {max_id}; at most {MAX_ID}")));
    }
    let n = max_id as usize + 1;

    let mut bytes = Pieces::with_capacity(n);
    let mut text = Pieces::with_capacity(n);
    let mut flags = Vec::with_capacity(n);
    for id in 0..n as u32 {
        let token = full.id_to_token(id).unwrap_or_default();
        text.push(token.as_bytes());
        let as_added = added.get_added_tokens_decoder().get(&id);
        match (&style, as_added) {
            (_, Some(_)) => bytes.push(token.as_bytes()),
            (Style::ByteLevel, None) => bytes.push(&byte_level_bytes(&token)),
            (Style::SentencePiece { .. }, None) => bytes.push(&spm_bytes(&token)),
            (Style::WordPiece { prefix }, None) => match token.strip_prefix(prefix.as_str()) {
                Some(rest) => bytes.push(rest.as_bytes()),
                None => bytes.push(format!(" {token}").as_bytes()),
            },
        }
        flags.push(if as_added.is_some_and(|t| t.special) { SPECIAL } else { 0 });
    }

    let mut pipeline = Pipeline::new(SharedModel(Arc::new(AnyModel::Hf(full.get_model().clone()))));
    let _ = pipeline.with_normalizer(full.get_normalizer().cloned());
    pipeline.with_pre_tokenizer(full.get_pre_tokenizer().cloned());
    pipeline.with_post_processor(full.get_post_processor().cloned());
    pipeline.with_decoder(full.get_decoder().cloned()); // only to be told to others: kvasir decodes by bytes
    pipeline.with_added_vocabulary(added);

    let merges = merges(json);
    let mut t = Tokenizer::new(pipeline, merges.as_deref().unwrap_or_default().iter().filter_map(Merge::pair));
    t.bytes = bytes;
    t.text = text;
    t.flags = flags;
    let id_of = |t: &Tokenizer, key: &str| named_token(&config, key).map_or(-1, |text| t.token_id(&text));
    t.bos = id_of(&t, "bos_token");
    let eos = id_of(&t, "eos_token");
    t.find_end_of_generation(&[eos]);
    if t.end_of_generation.is_empty() {
        let eos = t.token_id("</s>"); // without a config, the name SentencePiece gives it
        t.find_end_of_generation(&[eos]);
    }
    t.chat_template = chat_template(&config);
    t.strips_leading_space = matches!(style, Style::SentencePiece { strips: true } | Style::WordPiece { .. });
    Ok(t)
}
