//! Byte-pair merging: of all neighbours the pair that was learned first becomes one token, the leftmost on a tie, until
//! no pair is known.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

use tokenizers::Model;

const NONE: u32 = u32::MAX;
/// Pieces of more symbols keep their pairs in a queue; fewer are looked through each time.
const SHORT: usize = 48;

/// Keys are numbers of tokens or characters: multiplying spreads them well enough, and the map is not of a client's
/// making.
#[derive(Default)]
pub struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are numbers")
    }
    fn write_u32(&mut self, n: u32) {
        self.write_u64(u64::from(n));
    }
    fn write_u64(&mut self, n: u64) {
        let mixed = n.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ mixed >> 32;
    }
    fn finish(&self) -> u64 {
        self.0
    }
}

pub type Numbered<K, V> = HashMap<K, V, BuildHasherDefault<NumberHasher>>;

/// What two neighbours become, and when that was learned: the lower, the sooner.
#[derive(Default)]
pub struct Pairs(Numbered<u64, (u32, u32)>);

/// What merging needs beside its result, kept between pieces.
#[derive(Default)]
pub struct Scratch {
    pub ids: Vec<u32>,
    ranks: Vec<u32>, // of the pair that begins there
    next: Vec<u32>,
    previous: Vec<u32>,
    queue: Queue,
}

impl Pairs {
    pub fn insert(&mut self, left: u32, right: u32, rank: u32, becomes: u32) {
        self.0.insert(key(left, right), (rank, becomes));
    }

    pub fn each(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.0.keys().map(|&pair| ((pair >> 32) as u32, pair as u32))
    }

    /// Of `s.ids`, in place.
    pub fn merge(&self, s: &mut Scratch) {
        if s.ids.len() < 2 {
            return;
        }
        s.ranks.clear();
        s.ranks.extend(s.ids.windows(2).map(|two| self.rank(two[0], two[1])));
        if s.ids.len() <= SHORT {
            self.merge_short(s);
        } else {
            self.merge_long(s);
        }
    }

    fn merge_short(&self, s: &mut Scratch) {
        while let Some((at, &rank)) = s.ranks.iter().enumerate().min_by_key(|&(at, &rank)| (rank, at)) {
            if rank == NONE {
                break;
            }
            s.ids[at] = self.0[&key(s.ids[at], s.ids[at + 1])].1;
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
        s.queue.begin((0..n - 1).filter(|&at| ranks[at] != NONE).map(|at| key(ranks[at], at as u32)));
        while let Some(entry) = s.queue.pop() {
            let (rank, at) = ((entry >> 32) as u32, entry as u32 as usize);
            if s.ranks[at] != rank {
                continue; // one of the two has become another since
            }
            let right = s.next[at] as usize;
            s.ids[at] = self.0[&key(s.ids[at], s.ids[right])].1;
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
            s.queue.push(key(s.ranks[left], left as u32));
        }
    }

    fn rank(&self, left: u32, right: u32) -> u32 {
        self.0.get(&key(left, right)).map_or(NONE, |&(rank, _)| rank)
    }
}

fn key(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

/// The least first. A text that repeats itself pushes in ascending order, of a few kinds by turns: each goes behind
/// others that are less, and only what finds no such place goes to a heap.
#[derive(Default)]
struct Queue {
    rows: [VecDeque<u64>; Queue::ROWS],
    heap: BinaryHeap<Reverse<u64>>,
}

impl Queue {
    const ROWS: usize = 4;

    fn begin(&mut self, entries: impl Iterator<Item = u64>) {
        let mut first = Vec::from(std::mem::take(&mut self.rows[0]));
        first.clear();
        first.extend(entries);
        first.sort_unstable();
        self.rows[0] = first.into();
    }

    fn push(&mut self, entry: u64) {
        match self.rows.iter_mut().find(|row| row.back().is_none_or(|&last| last <= entry)) {
            Some(row) => row.push_back(entry),
            None => self.heap.push(Reverse(entry)),
        }
    }

    fn pop(&mut self) -> Option<u64> {
        let front = |row: &VecDeque<u64>| row.front().copied().unwrap_or(u64::MAX);
        let fronts = self.rows.each_ref().map(front);
        let (row, &least) = fronts.iter().enumerate().min_by_key(|&(_, &entry)| entry)?;
        if let Some(&Reverse(top)) = self.heap.peek().filter(|top| top.0 < least) {
            self.heap.pop();
            return Some(top);
        }
        self.rows[row].pop_front()
    }
}

/// Of a byte-level vocabulary.
pub struct Merges {
    of_byte: [u32; 256], // NONE: such a byte is left out of texts
    pairs: Pairs,
}

impl Merges {
    /// `written`: the character that stands for each byte. None where the merges do not fit.
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
        Some(Merges { of_byte, pairs: learned(model, pairs)? })
    }

    /// Whether every byte has a token.
    pub fn complete(&self) -> bool {
        !self.of_byte.contains(&NONE)
    }

    pub fn merge(&self, piece: &[u8], s: &mut Scratch, out: &mut Vec<i32>) {
        s.ids.clear();
        s.ids.extend(piece.iter().map(|&byte| self.of_byte[byte as usize]).filter(|&id| id != NONE));
        self.pairs.merge(s);
        out.extend(s.ids.iter().map(|&id| id as i32));
    }
}

/// Pairs in the order in which they were learned. None where one of them is of no tokens.
pub fn learned<'a>(model: &impl Model, pairs: impl Iterator<Item = (&'a str, &'a str)>) -> Option<Pairs> {
    let mut out = Pairs::default();
    let mut text = String::new();
    for (rank, (a, b)) in pairs.enumerate() {
        text.clear();
        text.push_str(a);
        text.push_str(b);
        out.insert(model.token_to_id(a)?, model.token_to_id(b)?, rank as u32, model.token_to_id(&text)?);
    }
    Some(out)
}
