//! The part of the crate `ahash` that the libraries under us use, over foldhash, with each hash charged to the meter.
//!
//! Why: the grammar library has fuel, but looks at it only between steps that may each take for ever (a derivative of
//! patterns that all must match is as large as the product of theirs). All of its expressions live in hash tables, so
//! whoever hashes sees all of its work, and can end it.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, Hasher};

mod tables;
pub use tables::{AHashMap, AHashSet};

#[derive(Clone)]
pub struct AHasher(foldhash::fast::FoldHasher<'static>);

impl Default for AHasher {
    fn default() -> AHasher {
        AHasher(foldhash::fast::FixedState::default().build_hasher())
    }
}

macro_rules! whole_numbers {
    ($($name:ident: $type:ty),*) => {
        $(#[inline]
        fn $name(&mut self, value: $type) {
            self.0.$name(value);
        })*
    };
}

impl Hasher for AHasher {
    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        meter::charge(bytes.len() / 8);
        self.0.write(bytes);
    }
    #[inline]
    fn finish(&self) -> u64 {
        meter::charge(1);
        self.0.finish()
    }
    whole_numbers!(write_u8: u8, write_u16: u16, write_u32: u32, write_u64: u64, write_u128: u128, write_usize: usize);
}

#[derive(Clone, Debug)]
pub struct RandomState(foldhash::fast::RandomState);

impl RandomState {
    pub fn new() -> RandomState {
        RandomState(foldhash::fast::RandomState::default())
    }
}

impl Default for RandomState {
    fn default() -> RandomState {
        RandomState::new()
    }
}

impl BuildHasher for RandomState {
    type Hasher = AHasher;
    #[inline]
    fn build_hasher(&self) -> AHasher {
        AHasher(self.0.build_hasher())
    }
}

type Map<K, V> = HashMap<K, V, RandomState>;
type Set<K> = HashSet<K, RandomState>;
