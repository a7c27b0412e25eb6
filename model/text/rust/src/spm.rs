//! SentencePiece's BPE over a scored vocabulary: the pair whose union scores highest merges first, the
//! leftmost on a tie; what is left over falls back to byte tokens.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

use tokenizers::Token;

pub const NONE: u32 = u32::MAX;

pub struct Spm {
    texts: Vec<String>,
    ids: HashMap<String, u32>,
    scores: Vec<f32>,
    mergeable: Vec<bool>,
    pub bytes: [u32; 256], // <0x00> ... <0xFF>
    pub unknown: u32,
}

/// The tokens of single bytes; NONE where there is none.
pub fn byte_tokens(id_of: impl Fn(&str) -> Option<u32>) -> [u32; 256] {
    std::array::from_fn(|byte| id_of(&format!("<0x{byte:02X}>")).unwrap_or(NONE))
}

struct Candidate {
    score: f32,
    left: u32,
    right: u32,
    size: u32, // of both together when this was queued: stale if it no longer holds
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for Candidate {}
impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

struct Symbol {
    start: u32,
    size: u32, // 0: merged away
    prev: u32,
    next: u32,
}

impl Spm {
    /// `mergeable`: which tokens a merge may make (not control, unknown or byte tokens).
    pub fn new(texts: Vec<String>, scores: Vec<f32>, mergeable: Vec<bool>, unknown: i32) -> Spm {
        let mut ids = HashMap::with_capacity(texts.len());
        for (id, text) in texts.iter().enumerate() {
            ids.entry(text.clone()).or_insert(id as u32);
        }
        let bytes = byte_tokens(|token| ids.get(token).copied());
        Spm { texts, ids, scores, mergeable, bytes, unknown: if unknown < 0 { NONE } else { unknown as u32 } }
    }

    pub fn len(&self) -> usize {
        self.texts.len()
    }

    /// The same merges as a tokenizer.json has them: every way to make a token of two others, best score first.
    pub fn to_json(&self) -> serde_json::Value {
        let mut merges: Vec<(f32, u32, &str, &str)> = Vec::new();
        for (id, text) in self.texts.iter().enumerate() {
            if !self.mergeable[id] || self.ids[text] != id as u32 {
                continue;
            }
            for (at, _) in text.char_indices().skip(1) {
                let (left, right) = text.split_at(at);
                if self.ids.contains_key(left) && self.ids.contains_key(right) {
                    merges.push((self.scores[id], id as u32, left, right));
                }
            }
        }
        merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let pairs: Vec<[&str; 2]> = merges.iter().map(|m| [m.2, m.3]).collect();
        let unknown = (self.unknown != NONE).then(|| self.texts[self.unknown as usize].as_str());
        serde_json::json!({
            "type": "BPE",
            "dropout": null,
            "unk_token": unknown,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": true,
            "byte_fallback": true,
            "ignore_merges": false,
            "vocab": self.ids,
            "merges": pairs,
        })
    }
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.ids.get(token).copied()
    }
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.texts.get(id as usize).cloned()
    }
    pub fn vocab(&self) -> HashMap<String, u32> {
        self.ids.clone()
    }

    pub fn merged(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied().filter(|&id| self.mergeable[id as usize])
    }

    /// The tokens that a merge may make.
    pub fn mergeable(&self) -> impl Iterator<Item = (&str, u32)> {
        let all = self.texts.iter().enumerate().map(|(id, text)| (text.as_str(), id as u32));
        all.filter(|&(text, id)| self.merged(text) == Some(id))
    }

    /// Of the same tokens, how many scores are higher than theirs.
    pub fn ranks(&self) -> impl Iterator<Item = u32> + '_ {
        let mut scores: Vec<f32> = self.mergeable().map(|(_, id)| self.scores[id as usize]).collect();
        scores.sort_unstable_by(|a, b| b.total_cmp(a));
        scores.dedup_by(|a, b| a.total_cmp(b) == Ordering::Equal);
        let rank = move |id: u32| {
            let score = self.scores[id as usize];
            scores.partition_point(|higher| higher.total_cmp(&score) == Ordering::Greater) as u32
        };
        self.mergeable().map(move |(_, id)| rank(id))
    }

    pub fn tokenize(&self, text: &str) -> Vec<Token> {
        let mut symbols: Vec<Symbol> = Vec::with_capacity(text.len());
        for (start, c) in text.char_indices() {
            let i = symbols.len() as u32;
            symbols.push(Symbol {
                start: start as u32,
                size: c.len_utf8() as u32,
                prev: i.wrapping_sub(1), // the first one's is NONE
                next: i + 1,
            });
        }
        if let Some(last) = symbols.last_mut() {
            last.next = NONE;
        }

        let mut queue = BinaryHeap::new();
        for i in 1..symbols.len() as u32 {
            self.offer(text, &symbols, i - 1, i, &mut queue);
        }
        while let Some(best) = queue.pop() {
            let (left, right) = (best.left as usize, best.right as usize);
            if symbols[left].size == 0
                || symbols[right].size == 0
                || symbols[left].size + symbols[right].size != best.size
            {
                continue;
            }
            symbols[left].size = best.size;
            symbols[right].size = 0;
            let next = symbols[right].next;
            symbols[left].next = next;
            if next != NONE {
                symbols[next as usize].prev = best.left;
                self.offer(text, &symbols, best.left, next, &mut queue);
            }
            let prev = symbols[left].prev;
            if prev != NONE {
                self.offer(text, &symbols, prev, best.left, &mut queue);
            }
        }

        let mut tokens = Vec::new();
        for symbol in symbols.iter().filter(|s| s.size != 0) {
            let (start, end) = (symbol.start as usize, (symbol.start + symbol.size) as usize);
            let piece = &text[start..end];
            if let Some(id) = self.merged(piece) {
                tokens.push(Token::new(id, piece.to_string(), (start, end)));
                continue;
            }
            for &byte in piece.as_bytes() {
                let id = match self.bytes[byte as usize] {
                    NONE => self.unknown,
                    id => id,
                };
                if id != NONE {
                    tokens.push(Token::new(id, self.texts[id as usize].clone(), (start, end)));
                }
                if id == self.unknown {
                    break; // one unknown token a character, not one a byte
                }
            }
        }
        tokens
    }

    fn offer(&self, text: &str, symbols: &[Symbol], left: u32, right: u32, queue: &mut BinaryHeap<Candidate>) {
        let (a, b) = (&symbols[left as usize], &symbols[right as usize]);
        let size = a.size + b.size;
        if let Some(id) = self.merged(&text[a.start as usize..(a.start + size) as usize]) {
            queue.push(Candidate { score: self.scores[id as usize], left, right, size });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn highest_score_merges_first_and_rest_falls_to_bytes() {
        let mut texts: Vec<String> = (0..256).map(|b| format!("<0x{b:02X}>")).collect();
        texts.extend(["a", "b", "c", "ab", "bc", "abc"].map(String::from));
        let scores: Vec<f32> = (0..texts.len()).map(|i| -(i as f32)).collect();
        let mergeable: Vec<bool> = (0..texts.len()).map(|i| i >= 256).collect();
        let spm = Spm::new(texts, scores, mergeable, -1);
        let ids = |s: &str| spm.tokenize(s).iter().map(|t| t.id).collect::<Vec<_>>();
        assert_eq!(ids("abc"), [261]);
        assert_eq!(ids("bcab"), [260, 259]);
        assert_eq!(ids("a\u{e9}"), [256, 0xC3, 0xA9]);
        assert!(ids("").is_empty());
    }
}
