//! SentencePiece's vocabularies of unigrams: of all ways to make a text of tokens the one whose scores sum highest, and
//! of two the one that was found first, as the library has it.

use tokenizers::models::unigram::Unigram;

use crate::spm::{byte_tokens, NONE};

/// What a character that is no token costs below the lowest score.
const UNKNOWN_COSTS: f64 = 10.0;

pub struct Unigrams {
    trie: Trie,
    scores: Vec<f64>,
    unknown: u32,
    unknown_score: f64,
    bytes: Option<[u32; 256]>, // of what is in no token; else the unknown token stands for it
}

#[derive(Clone, Copy)]
struct Best {
    score: f64,
    start: u32, // NONE: no way leads here
    id: u32,
}

/// Kept between pieces.
#[derive(Default)]
pub struct Paths {
    best: Vec<Best>,
    taken: Vec<Best>, // from the end to the beginning; `score` is of no use there
}

impl Unigrams {
    pub fn of(model: &Unigram) -> Option<Unigrams> {
        Unigrams::of_those(model, |_| true)
    }

    /// `has`: whether a text may have this token.
    pub fn of_those(model: &Unigram, has: impl Fn(usize) -> bool) -> Option<Unigrams> {
        #[derive(serde::Deserialize)]
        struct Unknown {
            unk_id: Option<u32>,
        }
        if model.alpha.is_some() {
            return None;
        }
        let unknown = serde_json::from_str::<Unknown>(&serde_json::to_string(model).ok()?).ok()?.unk_id?;
        let all = || model.iter().enumerate().map(|(id, (text, _))| (text.as_str(), id as u32));
        let trie = Trie::of(all().filter(|&(_, id)| has(id as usize)).map(|(text, id)| (text.as_bytes(), id)));
        let bytes = model.byte_fallback().then(|| {
            let ids: std::collections::HashMap<&str, u32> = all().filter(|(text, _)| text.len() == 6).collect();
            byte_tokens(|token| ids.get(token).copied())
        });
        if bytes.is_some_and(|bytes| bytes.contains(&NONE)) {
            return None;
        }
        Some(Unigrams {
            trie,
            scores: model.iter().map(|&(_, score)| score).collect(),
            unknown,
            unknown_score: model.min_score - UNKNOWN_COSTS,
            bytes,
        })
    }

    pub fn encode(&self, text: &str, paths: &mut Paths, out: &mut Vec<i32>) {
        self.find_best(text, &mut paths.best);
        let (best, taken) = (&paths.best, &mut paths.taken);
        taken.clear();
        let mut end = text.len();
        while end > 0 {
            taken.push(best[end]);
            end = best[end].start as usize;
        }
        let mut steps = taken.iter().rev().peekable();
        while let Some(step) = steps.next() {
            if step.id != self.unknown {
                out.push(step.id as i32);
                continue;
            }
            while steps.next_if(|next| next.id == self.unknown).is_some() {}
            let end = steps.peek().map_or(text.len(), |next| next.start as usize);
            self.spell(&text.as_bytes()[step.start as usize..end], out);
        }
    }

    fn find_best(&self, text: &str, best: &mut Vec<Best>) {
        best.clear();
        best.resize(text.len() + 1, Best { score: 0.0, start: NONE, id: 0 });
        let bytes = text.as_bytes();
        for (start, c) in text.char_indices() {
            let (so_far, end) = (best[start].score, start + c.len_utf8());
            let mut offer = |end: usize, score: f64, id: u32| {
                let at = &mut best[end];
                if at.start == NONE || score + so_far > at.score {
                    *at = Best { score: score + so_far, start: start as u32, id };
                }
            };
            let mut alone = false;
            self.trie.prefixes(&bytes[start..], |length, id| {
                offer(start + length, self.scores[id as usize], id);
                alone |= start + length == end;
            });
            if !alone {
                offer(end, self.unknown_score, self.unknown);
            }
        }
    }

    /// Characters in a row that are no tokens.
    fn spell(&self, text: &[u8], out: &mut Vec<i32>) {
        match (self.trie.find(text), &self.bytes) {
            (Some(id), _) => out.push(id as i32),
            (None, Some(bytes)) => out.extend(text.iter().map(|&byte| bytes[byte as usize] as i32)),
            (None, None) => out.push(self.unknown as i32),
        }
    }
}

/// A double array: the child of a node by a byte is the cell at the node's base and the byte, if it says so.
struct Trie {
    cells: Vec<Cell>,
}

#[derive(Clone, Copy)]
struct Cell {
    base: u32,
    parent: u32, // NONE: free
    id: u32,     // NONE: no token ends here
}

const FREE: Cell = Cell { base: 0, parent: NONE, id: NONE };

impl Trie {
    /// Of two of the same bytes the last.
    fn of<'a>(tokens: impl Iterator<Item = (&'a [u8], u32)>) -> Trie {
        let mut tokens: Vec<(&[u8], u32)> = tokens.filter(|(bytes, _)| !bytes.is_empty()).collect();
        tokens.sort();
        let mut trie = Trie { cells: vec![Cell { parent: 0, ..FREE }] };
        let mut from = 1; // no cell before it is free
        let mut open = vec![(0, 0, 0..tokens.len())]; // nodes without their children: cell, depth, their tokens
        while let Some((node, depth, range)) = open.pop() {
            let all = &tokens[range.clone()];
            let here = all.iter().take_while(|(bytes, _)| bytes.len() == depth).count();
            if let Some(&(_, id)) = all[..here].last() {
                trie.cells[node].id = id;
            }
            let mut begin = range.start + here;
            let children: Vec<_> = all[here..]
                .chunk_by(|a, b| a.0[depth] == b.0[depth])
                .map(|of_byte| {
                    begin += of_byte.len();
                    (of_byte[0].0[depth] as usize, begin - of_byte.len()..begin)
                })
                .collect();
            if children.is_empty() {
                continue;
            }
            let base = trie.place(&mut from, children.iter().map(|&(byte, _)| byte));
            trie.cells[node].base = base as u32;
            for (byte, range) in children {
                trie.cells[base + byte].parent = node as u32;
                open.push((base + byte, depth + 1, range));
            }
        }
        trie.cells.resize(trie.cells.len() + 256, FREE); // any byte of the last base is within
        trie
    }

    /// A base whose cells are free. Few are looked at: what is left empty costs little.
    fn place(&mut self, from: &mut usize, bytes: impl Iterator<Item = usize> + Clone) -> usize {
        const TRIES: usize = 64;
        while self.cells.get(*from).is_some_and(|cell| cell.parent != NONE) {
            *from += 1;
        }
        let first = bytes.clone().next().unwrap_or(0);
        let free = |at: usize| self.cells.get(at).is_none_or(|cell| cell.parent == NONE);
        let fits = |base: &usize| bytes.clone().all(|byte| free(base + byte));
        let begin = from.saturating_sub(first).max(1);
        let base = (begin..begin + TRIES).find(fits).unwrap_or(self.cells.len());
        let last = bytes.last().unwrap_or(0);
        if self.cells.len() <= base + last {
            self.cells.resize(base + last + 1, FREE);
        }
        base
    }

    fn child(&self, node: usize, byte: u8) -> Option<usize> {
        let at = self.cells[node].base as usize + byte as usize;
        (self.cells[at].parent == node as u32 && at != 0).then_some(at)
    }

    fn find(&self, text: &[u8]) -> Option<u32> {
        let node = text.iter().try_fold(0, |node, &byte| self.child(node, byte))?;
        Some(self.cells[node].id).filter(|&id| id != NONE)
    }

    /// The tokens that a text begins with, the shortest first: how many bytes each has, and which it is.
    fn prefixes(&self, text: &[u8], mut found: impl FnMut(usize, u32)) {
        let mut node = 0;
        for (i, &byte) in text.iter().enumerate() {
            match self.child(node, byte) {
                Some(child) => node = child,
                None => return,
            }
            if self.cells[node].id != NONE {
                found(i + 1, self.cells[node].id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::Model;

    #[test]
    fn as_the_library_has_it() {
        let texts = ["<unk>", "a", "b", "ab", "abc", "cd", "\u{e9}", "\u{e9}a", "ba", "aaaa", "b"];
        let scores = [0.0, -1.0, -2.0, -2.5, -1.5, -4.0, -2.0, -3.0, -3.0, -3.5, -2.25];
        let tokens: Vec<(String, f64)> = texts.iter().map(|t| t.to_string()).zip(scores).collect();
        let model = Unigram::from(tokens, Some(0), false).unwrap();
        let ours = Unigrams::of(&model).unwrap();
        let letters = ["a", "b", "c", "d", "\u{e9}", "x", "\u{4e2d}"];
        let mut state = 7u32;
        for _ in 0..2000 {
            let mut text = String::new();
            for _ in 0..1 + state % 12 {
                state = state.wrapping_mul(1664525).wrapping_add(1013904223);
                text.push_str(letters[(state >> 16) as usize % letters.len()]);
            }
            let mut ids = Vec::new();
            ours.encode(&text, &mut Paths::default(), &mut ids);
            let want: Vec<i32> = model.tokenize(&text).unwrap().iter().map(|t| t.id as i32).collect();
            assert_eq!(ids, want, "{text}");
        }
    }
}
