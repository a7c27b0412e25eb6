//! How a model's tokenizer cuts text before byte-pair merging, by the name GGUF gives the rule
//! (tokenizer.ggml.pre). The patterns are those of the models' own tokenizer.json files.

use serde_json::{json, Value};
use tokenizers::normalizers::Precompiled;
use tokenizers::{DecoderWrapper, NormalizerWrapper, PreTokenizerWrapper};

use crate::border::{invalid, Error, Result, INTERNAL, UNIMPLEMENTED};
use crate::cuts::GPT2;

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const SEED_CODER: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
// That of Moonshot's tiktoken files, too (model/formats/tiktoken_vocab.cc).
const KIMI: &str = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
// Letters that Unicode normalization would change are escaped: a range that ends in one would be empty.
const DEEPSEEK_LATIN: &str = r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌῐ-\x{1FD3}ῖ-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";
const BLOOM: &str = r" ?[^(\s|[.,!?…。，、।۔،])]+";

/// As a step: what follows cuts the text as the vocabulary writes it, byte by byte.
const BYTES: &str = "<bytes>";

pub struct Rule {
    pub steps: &'static [&'static str], // each cuts what the one before left whole
    pub nfc: bool,
    pub ignore_merges: bool, // a piece that is a token as it stands is not merged up to it
}

const fn rule(steps: &'static [&'static str]) -> Rule {
    Rule { steps, nfc: false, ignore_merges: false }
}

const KNOWN: &[(&[&str], Rule)] = &[
    (&["gpt2", "gpt-2", "mpt", "olmo", "jais", "phi-2", "trillion", "granite-docling", "jina-v2-code"], rule(&[GPT2])),
    (&["smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"], rule(&[r"\p{N}", GPT2])),
    (&["command-r"], Rule { steps: &[r"\p{N}", GPT2], nfc: true, ignore_merges: false }),
    (
        &["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"],
        Rule { steps: &[LLAMA3], nfc: false, ignore_merges: true },
    ),
    (&["dbrx", "smaug-bpe", "chatglm-bpe", "glm4"], rule(&[LLAMA3])),
    (
        &["qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open"],
        Rule { steps: &[QWEN2], nfc: true, ignore_merges: false },
    ),
    (&["qwen35"], Rule { steps: &[QWEN35], nfc: true, ignore_merges: false }),
    (&["grok-2"], rule(&[QWEN2])),
    (&["seed-coder"], rule(&[SEED_CODER])),
    (&["tekken"], Rule { steps: &[TEKKEN], nfc: false, ignore_merges: true }),
    (&["gpt-4o", "llama4"], rule(&[GPT4O])),
    (&["kimi-k2"], rule(&[KIMI])),
    (
        &["deepseek-llm"],
        rule(&[r"[\r\n]", DEEPSEEK_LATIN, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"]),
    ),
    (&["deepseek-coder"], rule(&[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"])),
    (&["deepseek-v3", "hunyuan-dense"], rule(&[r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3])),
    (&["falcon"], rule(&[r"[\p{P}$+<=>^~|`]+", GPT2, BYTES, r"\p{N}+", r"[0-9][0-9][0-9]"])),
    (&["bloom", "poro-chat", "gpt3-finnish"], rule(&[BLOOM])),
    (&["default", ""], rule(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"])),
];

pub fn find(name: &str) -> Result<&'static Rule> {
    if let Some((_, rule)) = KNOWN.iter().find(|(names, _)| names.contains(&name)) {
        return Ok(rule);
    }
    let names: Vec<&str> =
        KNOWN.iter().flat_map(|(names, _)| names.iter().copied()).filter(|n| !n.is_empty()).collect();
    Err(Error {
        code: UNIMPLEMENTED,
        message: format!(
            "tokenizer.ggml.pre is \"{name}\", a rule this build does not know; it knows {}",
            names.join(", ")
        ),
    })
}

fn part<T: serde::de::DeserializeOwned>(what: Value) -> Result<T> {
    serde_json::from_value(what).map_err(|e| Error { code: INTERNAL, message: e.to_string() })
}

pub fn pre_tokenizer(rule: &Rule) -> Result<PreTokenizerWrapper> {
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let mut steps: Vec<Value> = Vec::new();
    for &step in rule.steps {
        steps.push(match step {
            BYTES => bytes.clone(),
            regex => json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false}),
        });
    }
    if !rule.steps.contains(&BYTES) {
        steps.push(bytes);
    }
    part(json!({"type": "Sequence", "pretokenizers": steps}))
}

pub fn nfc() -> Result<NormalizerWrapper> {
    part(json!({"type": "NFC"}))
}

/// SentencePiece's: spaces become the lower block, and a text begins with one if the model wants it.
pub fn sentence_piece(add_space_prefix: bool) -> Result<NormalizerWrapper> {
    let mut steps = Vec::new();
    if add_space_prefix {
        steps.push(json!({"type": "Prepend", "prepend": "\u{2581}"}));
    }
    steps.push(json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"}));
    part(json!({"type": "Sequence", "normalizers": steps}))
}

pub struct Unigrams {
    pub normalizer: Option<NormalizerWrapper>,
    pub pre_tokenizer: Option<PreTokenizerWrapper>,
    pub decoder: DecoderWrapper,
}

/// What stands around SentencePiece's unigrams: its table of characters, and the lower block before each word.
pub fn unigram(charsmap: &[u8], remove_extra_spaces: bool, add_space_prefix: bool) -> Result<Unigrams> {
    let normalizer = match charsmap {
        [] => None,
        table => Some(NormalizerWrapper::Precompiled(Precompiled::from(table).map_err(|e| {
            invalid(format!("tokenizer.ggml.precompiled_charsmap cannot be read: {e}"))
        })?)),
    };
    let scheme = if add_space_prefix { "always" } else { "never" };
    let words = json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": true});
    let steps = match remove_extra_spaces {
        true => json!({"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, words]}),
        false => words.clone(),
    };
    Ok(Unigrams { normalizer, pre_tokenizer: Some(part(steps)?), decoder: part(words)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rule_compiles() {
        for (names, rule) in KNOWN {
            assert!(pre_tokenizer(rule).is_ok(), "{names:?}");
        }
        assert!(sentence_piece(true).is_ok() && nfc().is_ok());
        assert!(find("no-such-rule").is_err());
    }
}
