//! The standard library's tables with our state, under names of their own so that they have `new` and `from`.

use std::collections::{hash_map, hash_set};
use std::hash::Hash;
use std::ops::{Deref, DerefMut};

use crate::{Map, RandomState, Set};

#[derive(Clone, Debug)]
pub struct AHashMap<K, V>(Map<K, V>);

#[derive(Clone, Debug)]
pub struct AHashSet<K>(Set<K>);

macro_rules! table {
    ($name:ident<$($p:ident),*>, $inner:ty, $item:ty, $into:ty) => {
        impl<$($p),*> $name<$($p),*> {
            pub fn new() -> Self {
                Self::with_capacity(0)
            }
            pub fn with_capacity(capacity: usize) -> Self {
                $name(<$inner>::with_capacity_and_hasher(capacity, RandomState::new()))
            }
        }
        impl<$($p),*> Default for $name<$($p),*> {
            fn default() -> Self {
                Self::new()
            }
        }
        impl<$($p),*> Deref for $name<$($p),*> {
            type Target = $inner;
            fn deref(&self) -> &$inner {
                &self.0
            }
        }
        impl<$($p),*> DerefMut for $name<$($p),*> {
            fn deref_mut(&mut self) -> &mut $inner {
                &mut self.0
            }
        }
        impl<$($p),*> IntoIterator for $name<$($p),*> {
            type Item = $item;
            type IntoIter = $into;
            fn into_iter(self) -> $into {
                self.0.into_iter()
            }
        }
    };
}
table!(AHashMap<K, V>, Map<K, V>, (K, V), hash_map::IntoIter<K, V>);
table!(AHashSet<K>, Set<K>, K, hash_set::IntoIter<K>);

impl<K: Eq + Hash, V> AHashMap<K, V> {
    /// Not through Deref: what is inserted may still read what holds the table.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        self.0.insert(key, value)
    }
}

impl<K: Eq + Hash> AHashSet<K> {
    pub fn insert(&mut self, key: K) -> bool {
        self.0.insert(key)
    }
}

impl<'a, K, V> IntoIterator for &'a AHashMap<K, V> {
    type Item = (&'a K, &'a V);
    type IntoIter = hash_map::Iter<'a, K, V>;
    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl<'a, K> IntoIterator for &'a AHashSet<K> {
    type Item = &'a K;
    type IntoIter = hash_set::Iter<'a, K>;
    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl<K: Eq + Hash, V> FromIterator<(K, V)> for AHashMap<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(items: I) -> Self {
        AHashMap(items.into_iter().collect())
    }
}

impl<K: Eq + Hash> FromIterator<K> for AHashSet<K> {
    fn from_iter<I: IntoIterator<Item = K>>(items: I) -> Self {
        AHashSet(items.into_iter().collect())
    }
}

impl<K: Eq + Hash, V, const N: usize> From<[(K, V); N]> for AHashMap<K, V> {
    fn from(items: [(K, V); N]) -> Self {
        items.into_iter().collect()
    }
}

impl<K: Eq + Hash, V> Extend<(K, V)> for AHashMap<K, V> {
    fn extend<I: IntoIterator<Item = (K, V)>>(&mut self, items: I) {
        self.0.extend(items)
    }
}

impl<K: Eq + Hash, V: PartialEq> PartialEq for AHashMap<K, V> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl<K: Eq + Hash, V: Eq> Eq for AHashMap<K, V> {}

impl<K: Eq + Hash> PartialEq for AHashSet<K> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl<K: Eq + Hash> Eq for AHashSet<K> {}

#[cfg(feature = "serde")]
mod serialized {
    use super::*;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    impl<K: Serialize, V: Serialize> Serialize for AHashMap<K, V> {
        fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
            self.0.serialize(to)
        }
    }
    impl<'de, K: Deserialize<'de> + Eq + Hash, V: Deserialize<'de>> Deserialize<'de> for AHashMap<K, V> {
        fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
            Map::deserialize(from).map(AHashMap)
        }
    }
    impl<K: Serialize> Serialize for AHashSet<K> {
        fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
            self.0.serialize(to)
        }
    }
    impl<'de, K: Deserialize<'de> + Eq + Hash> Deserialize<'de> for AHashSet<K> {
        fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
            Set::deserialize(from).map(AHashSet)
        }
    }
}
