//! Byte-pair merging: of all neighbours the pair that was learned first becomes one token, the leftmost on a tie, until
//! no pair is known.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

use tokenizers::Model;

const NONE: u32 = u32::MAX;
/// Pieces of more bytes keep their pairs in a heap; fewer are looked through each time.
const SHORT: usize = 48;

/// Keys are two token ids: multiplying spreads them well enough, and the map is not of a client's making.
#[derive(Default)]
struct PairHasher(u64);

impl Hasher for PairHasher {
    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are u64")
    }
    fn write_u64(&mut self, pair: u64) {
        let mixed = pair.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ mixed >> 32;
    }
    fn finish(&self) -> u64 {
        self.0
    }
}

pub struct Merges {
    of_byte: [u32; 256], // NONE: such a byte is left out of texts
    pairs: HashMap<u64, (u32, u32), BuildHasherDefault<PairHasher>>, // when it was learned, what it becomes
}

/// What merging needs beside its result, kept between pieces.
#[derive(Default)]
pub struct Scratch {
    ids: Vec<u32>,
    ranks: Vec<u32>, // of the pair that begins there
    next: Vec<u32>,
    previous: Vec<u32>,
    heap: BinaryHeap<Reverse<u64>>,
}

impl Merges {
    /// Of a byte-level vocabulary; `written`: the character that stands for each byte. None where the merges do not fit.
    pub fn new<'a>(
        model: &impl Model,
        written: &[char; 256],
        pairs: impl Iterator<Item = (&'a str, &'a str)>,
    ) -> Option<Merges> {
        let mut of_byte = [NONE; 256];
        let mut text = String::new();
        for (slot, &c) in of_byte.iter_mut().zip(written) {
            text.clear();
            text.push(c);
            *slot = model.token_to_id(&text).unwrap_or(NONE);
        }
        let mut merges = Merges { of_byte, pairs: HashMap::default() };
        for (rank, (a, b)) in pairs.enumerate() {
            text.clear();
            text.push_str(a);
            text.push_str(b);
            let pair = key(model.token_to_id(a)?, model.token_to_id(b)?);
            merges.pairs.insert(pair, (rank as u32, model.token_to_id(&text)?));
        }
        Some(merges)
    }

    /// Whether every byte has a token.
    pub fn complete(&self) -> bool {
        !self.of_byte.contains(&NONE)
    }

    pub fn merge(&self, piece: &[u8], scratch: &mut Scratch, out: &mut Vec<i32>) {
        let s = scratch;
        s.ids.clear();
        s.ids.extend(piece.iter().map(|&byte| self.of_byte[byte as usize]).filter(|&id| id != NONE));
        if s.ids.len() > 1 {
            s.ranks.clear();
            s.ranks.extend(s.ids.windows(2).map(|two| self.rank(two[0], two[1])));
            if s.ids.len() <= SHORT {
                self.merge_short(s);
            } else {
                self.merge_long(s);
            }
        }
        out.extend(s.ids.iter().map(|&id| id as i32));
    }

    fn merge_short(&self, s: &mut Scratch) {
        while let Some((at, &rank)) = s.ranks.iter().enumerate().min_by_key(|&(at, &rank)| (rank, at)) {
            if rank == NONE {
                break;
            }
            s.ids[at] = self.pairs[&key(s.ids[at], s.ids[at + 1])].1;
            s.ids.remove(at + 1);
            s.ranks.remove(at);
            if at > 0 {
                s.ranks[at - 1] = self.rank(s.ids[at - 1], s.ids[at]);
            }
            if at < s.ranks.len() {
                s.ranks[at] = self.rank(s.ids[at], s.ids[at + 1]);
            }
        }
    }

    fn merge_long(&self, s: &mut Scratch) {
        let n = s.ids.len();
        s.ranks.push(NONE);
        s.next.clear();
        s.next.extend(1..=n as u32);
        s.previous.clear();
        s.previous.extend((0..n as u32).map(|at| at.wrapping_sub(1)));
        let ranks = &s.ranks;
        let known = (0..n - 1).filter(|&at| ranks[at] != NONE).map(|at| Reverse(key(ranks[at], at as u32)));
        let mut queue = std::mem::take(&mut s.heap).into_vec();
        queue.clear();
        queue.extend(known);
        s.heap = queue.into();
        while let Some(Reverse(entry)) = s.heap.pop() {
            let (rank, at) = ((entry >> 32) as u32, entry as u32 as usize);
            if s.ranks[at] != rank {
                continue; // one of the two has become another since
            }
            let right = s.next[at] as usize;
            s.ids[at] = self.pairs[&key(s.ids[at], s.ids[right])].1;
            s.ranks[right] = NONE;
            s.next[at] = s.next[right];
            let behind = s.next[at] as usize;
            s.ranks[at] = NONE;
            if behind < n {
                s.previous[behind] = at as u32;
                self.queue(s, at, behind);
            }
            if s.previous[at] != NONE {
                self.queue(s, s.previous[at] as usize, at);
            }
        }
        let mut kept = 0;
        let mut at = 0;
        while at < n {
            s.ids[kept] = s.ids[at];
            kept += 1;
            at = s.next[at] as usize;
        }
        s.ids.truncate(kept);
    }

    fn queue(&self, s: &mut Scratch, left: usize, right: usize) {
        s.ranks[left] = self.rank(s.ids[left], s.ids[right]);
        if s.ranks[left] != NONE {
            s.heap.push(Reverse(key(s.ranks[left], left as u32)));
        }
    }

    fn rank(&self, left: u32, right: u32) -> u32 {
        self.pairs.get(&key(left, right)).map_or(NONE, |&(rank, _)| rank)
    }
}

fn key(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}
