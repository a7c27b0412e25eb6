//! What SentencePiece itself makes of a text before it looks for pieces: the longest sequence of characters that its table
//! knows is replaced, spaces that are too many go, and a block stands for each that is left.

use crate::border::{invalid, Result};

const BLOCK: char = '\u{2581}';
const LONGEST: usize = 64; // bytes that are replaced together, and that stand for them; SentencePiece's own have 33 at most

/// A double array of the sequences that are replaced, whose values are places in a text of replacements, each ended by a
/// zero byte.
struct Table {
    units: Vec<u32>,
    replacements: Vec<u8>,
}

pub struct Charsmap {
    table: Option<Table>,
    remove_extra_spaces: bool,
    add_space_prefix: bool,
}

impl Charsmap {
    /// `bytes`: the table as a model file has it; empty: nothing is replaced.
    pub fn new(bytes: &[u8], remove_extra_spaces: bool, add_space_prefix: bool) -> Result<Charsmap> {
        let table = if bytes.is_empty() { None } else { Some(Table::new(bytes)?) };
        Ok(Charsmap { table, remove_extra_spaces, add_space_prefix })
    }

    pub fn apply(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len() + 8);
        let mut rest = text;
        // A text of spaces alone is empty; nothing stands before it.
        let mut after_space = self.remove_extra_spaces;
        let mut begun = false;
        while !rest.is_empty() {
            let (mut made, used) = self.first_of(rest);
            rest = &rest[used..];
            if after_space {
                made = made.trim_start_matches(' ');
            }
            if !begun && (!made.is_empty() || !self.remove_extra_spaces) {
                begun = true;
                if self.add_space_prefix {
                    out.push(BLOCK);
                }
            }
            out.extend(made.chars().map(|c| if c == ' ' { BLOCK } else { c }));
            if !made.is_empty() {
                after_space = self.remove_extra_spaces && made.ends_with(' ');
            }
        }
        if self.remove_extra_spaces {
            out.truncate(out.trim_end_matches(BLOCK).len());
        }
        out
    }

    /// What the text begins with becomes, and how many bytes of it that is.
    fn first_of<'a>(&'a self, text: &'a str) -> (&'a str, usize) {
        let first = text.chars().next().map_or(0, char::len_utf8);
        match self.table.as_ref().and_then(|table| table.longest(text.as_bytes())) {
            Some((made, used)) if text.is_char_boundary(used) => (made, used),
            _ => (&text[..first], first),
        }
    }
}

impl Table {
    fn new(bytes: &[u8]) -> Result<Table> {
        let wrong = || invalid("the precompiled_charsmap cannot be read: it is not as long as it says");
        let size = bytes.get(..4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) as usize).ok_or_else(wrong)?;
        let units = bytes[4..].get(..size).filter(|_| size % 4 == 0).ok_or_else(wrong)?;
        let units = units.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let replacements = bytes[4 + size..].to_vec();
        if replacements.split(|&byte| byte == 0).any(|made| made.len() > LONGEST) {
            return Err(invalid(&format!("the precompiled_charsmap has a replacement of more than {LONGEST} bytes")));
        }
        Ok(Table { units, replacements })
    }

    fn longest(&self, text: &[u8]) -> Option<(&str, usize)> {
        let offset = |unit: u32| ((unit >> 10) << ((unit & 1 << 9) >> 6)) as usize;
        let mut at = offset(*self.units.first()?);
        let mut best = None;
        for (i, &byte) in text.iter().take(LONGEST).enumerate() {
            at ^= byte as usize;
            let Some(&unit) = self.units.get(at).filter(|&&unit| byte != 0 && unit & (1 << 31 | 0xff) == byte as u32)
            else {
                break;
            };
            at ^= offset(unit);
            if unit >> 8 & 1 == 1 {
                best = self.units.get(at).map(|value| ((value & (u32::MAX >> 1)) as usize, i + 1)).or(best);
            }
        }
        let (from, used) = best?;
        let made = self.replacements.get(from..)?;
        let made = &made[..made.iter().position(|&byte| byte == 0).unwrap_or(made.len())];
        Some((std::str::from_utf8(made).ok()?, used))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spaces_that_are_too_many_go() {
        let made = |text, remove, prefix| Charsmap::new(&[], remove, prefix).unwrap().apply(text).replace(BLOCK, "_");
        assert_eq!(made("  a  b\n c ", true, true), "_a_b\n_c");
        assert_eq!(made("  a  b ", false, true), "___a__b_");
        assert_eq!(made("  ", true, true), "");
        assert_eq!(made("  ", false, true), "___");
        assert_eq!(made("a", true, false), "a");
        assert_eq!(made("", false, true), "");
    }

    #[test]
    fn a_table_that_is_cut_is_refused() {
        for bytes in [&[1u8][..], &[8, 0, 0, 0, 1], &[3, 0, 0, 0, 1, 2, 3]] {
            assert!(Charsmap::new(bytes, true, true).is_err());
        }
        let long = [&[0, 0, 0, 0][..], &[b'a'; LONGEST + 1]].concat();
        assert!(Charsmap::new(&long, true, true).is_err());
        assert_eq!(Charsmap::new(&[0, 0, 0, 0], true, true).unwrap().apply("a"), "\u{2581}a");
    }
}
