//! SentencePiece's vocabularies of pairs: characters that are merged into tokens; those that are in none become the
//! tokens of their bytes.
//!
//! A text is cut wherever two characters meet that stand beside each other in no token: no merge can span the place.

use tokenizers::models::bpe::BPE;
use tokenizers::Model;

use crate::merges::{learned, Numbered, Pairs, Scratch};
use crate::spm::{byte_tokens, Spm, NONE};

/// A symbol is a token, or a character that is none: this and its number.
const CHARACTER: u32 = 1 << 31;
const BLOCK: char = '\u{2581}'; // SentencePiece's space

pub struct Chars {
    pairs: Pairs,
    tokens: Numbered<u32, u32>, // of characters
    of_ascii: [u32; 128],
    meets: Meets,
    bytes: [u32; 256],
    unknown: u32,
}

impl Chars {
    /// None where a text may have other tokens than those of its merges and of its bytes.
    pub fn of_merges<'a>(model: &BPE, pairs: impl Iterator<Item = (&'a str, &'a str)> + Clone) -> Option<Chars> {
        let bytes = byte_tokens(|token| model.token_to_id(token));
        if !model.byte_fallback || model.ignore_merges || bytes.contains(&NONE) {
            return None;
        }
        let mut meets = Meets::default();
        for (a, b) in pairs.clone() {
            meets.add(a.chars().chain(b.chars()));
        }
        let learned = learned(model, pairs)?;
        if learned.each().any(|(a, b)| bytes.contains(&a) || bytes.contains(&b)) {
            return None;
        }
        let alone = |(text, id): (String, u32)| single(&text).map(|c| (c as u32, id));
        let tokens = model.get_vocab().into_iter().filter_map(alone).collect();
        Some(Chars::new(learned, tokens, meets, bytes, NONE))
    }

    pub fn of_scores(spm: &Spm) -> Chars {
        let mut tokens: Numbered<u32, u32> = Numbered::default();
        let mut meets = Meets::default();
        for (text, id) in spm.mergeable() {
            meets.add(text.chars());
            if let Some(c) = single(text) {
                tokens.insert(c as u32, id);
            }
        }
        let symbol = |text: &str| match single(text) {
            Some(c) => Some(tokens.get(&(c as u32)).copied().unwrap_or(CHARACTER | c as u32)),
            None => spm.merged(text),
        };
        let mut pairs = Pairs::default();
        for ((text, id), rank) in spm.mergeable().zip(spm.ranks()) {
            for (at, _) in text.char_indices().skip(1) {
                if let (Some(left), Some(right)) = (symbol(&text[..at]), symbol(&text[at..])) {
                    pairs.insert(left, right, rank, id);
                }
            }
        }
        Chars::new(pairs, tokens, meets, spm.bytes, spm.unknown)
    }

    fn new(pairs: Pairs, tokens: Numbered<u32, u32>, meets: Meets, bytes: [u32; 256], unknown: u32) -> Chars {
        let of_ascii = std::array::from_fn(|c| tokens.get(&(c as u32)).copied().unwrap_or(CHARACTER | c as u32));
        Chars { pairs, tokens, of_ascii, meets, bytes, unknown }
    }

    pub fn encode(&self, text: &str, s: &mut Scratch, out: &mut Vec<i32>) {
        s.ids.clear();
        let mut before = None;
        for c in text.chars() {
            if before.is_some_and(|before| !self.meets.may(before, c)) {
                self.take(s, out);
            }
            s.ids.push(match self.of_ascii.get(c as usize) {
                Some(&symbol) => symbol,
                None => self.tokens.get(&(c as u32)).copied().unwrap_or(CHARACTER | c as u32),
            });
            before = Some(c);
        }
        self.take(s, out);
    }

    fn take(&self, s: &mut Scratch, out: &mut Vec<i32>) {
        self.pairs.merge(s);
        for symbol in s.ids.drain(..) {
            match symbol & CHARACTER {
                0 => out.push(symbol as i32),
                _ => self.spell(symbol & !CHARACTER, out),
            }
        }
    }

    fn spell(&self, c: u32, out: &mut Vec<i32>) {
        let mut utf8 = [0; 4];
        for &byte in char::from_u32(c).unwrap_or_default().encode_utf8(&mut utf8).as_bytes() {
            let id = match self.bytes[byte as usize] {
                NONE => self.unknown,
                id => id,
            };
            if id != NONE {
                out.push(id as i32);
            }
            if id == self.unknown {
                break; // one unknown token a character, not one a byte
            }
        }
    }
}

fn single(text: &str) -> Option<char> {
    let mut chars = text.chars();
    chars.next().filter(|_| chars.next().is_none())
}

/// Which characters stand beside each other in some token; of those beyond ASCII perhaps a few more.
struct Meets {
    exact: Vec<bool>, // of ASCII and the block
    hashed: Vec<u64>,
}

impl Meets {
    const NEAR: usize = 129;
    const BITS: u32 = 20;

    fn near(c: char) -> Option<usize> {
        match c {
            BLOCK => Some(128),
            _ => c.is_ascii().then_some(c as usize),
        }
    }
    fn bit(a: char, b: char) -> (usize, u64) {
        let mixed = (u64::from(a as u32) << 32 | u64::from(b as u32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let bit = (mixed >> (64 - Meets::BITS)) as usize;
        (bit / 64, 1 << (bit % 64))
    }

    fn add(&mut self, chars: impl Iterator<Item = char>) {
        let mut before = None;
        for c in chars {
            if let Some(before) = before.replace(c) {
                match (Meets::near(before), Meets::near(c)) {
                    (Some(a), Some(b)) => self.exact[a * Meets::NEAR + b] = true,
                    _ => {
                        let (word, bit) = Meets::bit(before, c);
                        self.hashed[word] |= bit;
                    }
                }
            }
        }
    }

    fn may(&self, a: char, b: char) -> bool {
        match (Meets::near(a), Meets::near(b)) {
            (Some(a), Some(b)) => self.exact[a * Meets::NEAR + b],
            _ => {
                let (word, bit) = Meets::bit(a, b);
                self.hashed[word] & bit != 0
            }
        }
    }
}

impl Default for Meets {
    fn default() -> Meets {
        Meets { exact: vec![false; Meets::NEAR * Meets::NEAR], hashed: vec![0; (1 << Meets::BITS) / 64] }
    }
}
