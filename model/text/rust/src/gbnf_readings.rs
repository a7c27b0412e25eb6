//! Whether a grammar's lexemes are read in one way only: the library takes the longest, and where a shorter one with what
//! may follow it begins alike, its words would be lost.

use std::collections::{HashMap, HashSet};

use crate::gbnf::{sorted, Gbnf, Node, Set};
use crate::gbnf_lark::{Item, Known, Lowering};

/// Beyond them it is not looked at whether the longest reading is the only one.
const MAX_POSITIONS: usize = 3_000;
const MAX_PAIRS: usize = 200_000;

impl Lowering<'_> {
    /// Lexemes that might be read where a shorter one, and what may follow it, should be.
    pub fn ambiguous(&self) -> Vec<String> {
        let all = || self.lexemes.iter().filter(|l| !l.character).map(|l| l.text.clone()).collect();
        let mut positions = Positions::default();
        for lexeme in &self.lexemes {
            if !positions.add(self.grammar, self.regular, &lexeme.node) {
                return all();
            }
        }
        let follow = Follow::new(self, &positions);
        match positions.continued(&follow.lexemes) {
            Some(longer) => longer.into_iter().map(|l| self.lexemes[l].text.clone()).collect(),
            None => all(),
        }
    }
}

fn meet(a: &Set, b: &Set) -> bool {
    a.iter().any(|x| b.iter().any(|y| x.0 <= y.1 && y.0 <= x.1))
}

fn join(into: &mut Set, more: &Set) -> bool {
    let mut both = into.clone();
    both.extend(more);
    let both = sorted(both);
    let grown = both != *into;
    *into = both;
    grown
}

/// Each lexeme as an automaton whose states are the characters of its expression (Glushkov's). Counts above one are taken
/// as any number: more words than there are, so that what is found safe is.
#[derive(Default)]
struct Positions {
    sets: Vec<Set>,
    next: Vec<Vec<usize>>,
    of: Vec<(Vec<usize>, HashSet<usize>)>, // of each lexeme, those it begins and ends with
    lexeme: Vec<usize>,
}

struct Part {
    empty: bool,
    first: Vec<usize>,
    last: Vec<usize>,
}

impl Positions {
    fn add(&mut self, grammar: &Gbnf, rules: &Known, node: &Node) -> bool {
        let Some(part) = self.part(grammar, rules, node) else { return false };
        self.lexeme.resize(self.sets.len(), self.of.len());
        self.of.push((part.first, part.last.into_iter().collect()));
        true
    }

    fn one(&mut self, set: Set) -> Option<Part> {
        self.sets.push(set);
        self.next.push(vec![]);
        let at = self.sets.len() - 1;
        (at < MAX_POSITIONS).then(|| Part { empty: false, first: vec![at], last: vec![at] })
    }

    fn part(&mut self, grammar: &Gbnf, rules: &Known, node: &Node) -> Option<Part> {
        match node {
            Node::Chars(set) => self.one(set.clone()),
            Node::Text(text) => {
                let mut whole = Part { empty: true, first: vec![], last: vec![] };
                for c in text.chars() {
                    let one = self.one(vec![(c as u32, c as u32)])?;
                    whole = self.then(whole, one);
                }
                Some(whole)
            }
            Node::Rule(r) if rules[*r]?.only_empty => Some(Part { empty: true, first: vec![], last: vec![] }),
            Node::Rule(r) => self.part(grammar, rules, &grammar.rules[*r]),
            Node::Seq(all) => {
                let mut whole = Part { empty: true, first: vec![], last: vec![] };
                for inner in all {
                    let part = self.part(grammar, rules, inner)?;
                    whole = self.then(whole, part);
                }
                Some(whole)
            }
            Node::Any(all) => {
                let mut whole = Part { empty: false, first: vec![], last: vec![] };
                for inner in all {
                    let part = self.part(grammar, rules, inner)?;
                    whole.empty |= part.empty;
                    whole.first.extend(part.first);
                    whole.last.extend(part.last);
                }
                Some(whole)
            }
            Node::Repeat(inner, least, most) => {
                let mut part = self.part(grammar, rules, inner)?;
                if *most != Some(1) {
                    for &at in &part.last {
                        self.next[at].extend(&part.first);
                    }
                }
                part.empty |= *least == 0;
                Some(part)
            }
            Node::Token(_) => unreachable!(),
        }
    }

    fn then(&mut self, mut a: Part, b: Part) -> Part {
        for &at in &a.last {
            self.next[at].extend(&b.first);
        }
        if a.empty {
            a.first.extend(&b.first);
        }
        let mut last = b.last;
        if b.empty {
            last.extend(&a.last);
        }
        Part { empty: a.empty && b.empty, first: a.first, last }
    }

    /// Lexemes with a word that begins as a shorter one's, this one or another, and goes on as what may follow that does.
    /// None: too many to look at.
    fn continued(&self, follow: &[Set]) -> Option<HashSet<usize>> {
        let mut found = HashSet::new();
        let begins: Vec<usize> = self.of.iter().flat_map(|(first, _)| first).copied().collect();
        let mut seen = HashSet::new();
        let mut open = vec![];
        for &p in &begins {
            for &q in &begins {
                if meet(&self.sets[p], &self.sets[q]) && seen.insert((p, q)) {
                    open.push((p, q));
                }
            }
        }
        while let Some((p, q)) = open.pop() {
            if seen.len() > MAX_PAIRS {
                return None;
            }
            let shorter = self.lexeme[p];
            let ends = self.of[shorter].1.contains(&p);
            if ends && self.next[q].iter().any(|&after| meet(&self.sets[after], &follow[shorter])) {
                found.insert(self.lexeme[q]);
            }
            for &after_p in &self.next[p] {
                for &after_q in &self.next[q] {
                    if meet(&self.sets[after_p], &self.sets[after_q]) && seen.insert((after_p, after_q)) {
                        open.push((after_p, after_q));
                    }
                }
            }
        }
        Some(found)
    }
}

/// The characters that may come after each lexeme.
struct Follow<'a> {
    of: &'a Lowering<'a>,
    first_of: Vec<Set>,                    // of lexemes
    begins: HashMap<&'a str, (bool, Set)>, // of rules: whether they may be empty, and their first characters
    after: HashMap<&'a str, Set>,
    lexemes: Vec<Set>,
}

impl<'a> Follow<'a> {
    fn new(of: &'a Lowering<'a>, positions: &Positions) -> Self {
        let first_of = positions
            .of
            .iter()
            .map(|(first, _)| sorted(first.iter().flat_map(|&p| positions.sets[p].iter().copied()).collect()))
            .collect();
        let lexemes = vec![vec![]; of.lexemes.len()];
        let mut follow = Follow { of, first_of, begins: HashMap::new(), after: HashMap::new(), lexemes };
        while follow.begin_more() {}
        while follow.follow_more() {}
        follow
    }

    fn begin_more(&mut self) -> bool {
        let mut grown = false;
        for (name, item) in &self.of.rules {
            let (empty, first) = self.begin(item);
            let known = self.begins.entry(name.as_str()).or_default();
            grown |= join(&mut known.1, &first) || (empty && !known.0);
            known.0 |= empty;
        }
        grown
    }

    fn begin(&self, item: &Item) -> (bool, Set) {
        match item {
            Item::Lexeme(i) => (false, self.first_of[*i].clone()),
            Item::Rule(name) => self.begins.get(name.as_str()).cloned().unwrap_or_default(),
            Item::Token(_) => (false, vec![]),
            Item::Seq(all) => {
                let mut out = (true, vec![]);
                for inner in all {
                    let (empty, first) = self.begin(inner);
                    join(&mut out.1, &first);
                    out.0 = empty;
                    if !empty {
                        break;
                    }
                }
                out
            }
            Item::Any(all) => {
                let mut out = (false, vec![]);
                for (empty, first) in all.iter().map(|inner| self.begin(inner)) {
                    join(&mut out.1, &first);
                    out.0 |= empty;
                }
                out
            }
            Item::Repeat(inner, least, _) => {
                let (empty, first) = self.begin(inner);
                (empty || *least == 0, first)
            }
        }
    }

    fn follow_more(&mut self) -> bool {
        let mut grown = false;
        for (name, item) in &self.of.rules {
            let after = self.after.get(name.as_str()).cloned().unwrap_or_default();
            grown |= self.follow(item, &after);
        }
        grown
    }

    fn follow(&mut self, item: &'a Item, after: &Set) -> bool {
        match item {
            Item::Lexeme(i) => join(&mut self.lexemes[*i], after),
            Item::Rule(name) => join(self.after.entry(name.as_str()).or_default(), after),
            Item::Token(_) => false,
            Item::Seq(all) => {
                let mut after = after.clone();
                let mut grown = false;
                for inner in all.iter().rev() {
                    grown |= self.follow(inner, &after);
                    let (empty, first) = self.begin(inner);
                    if empty {
                        join(&mut after, &first);
                    } else {
                        after = first;
                    }
                }
                grown
            }
            Item::Any(all) => all.iter().fold(false, |grown, inner| self.follow(inner, after) || grown),
            Item::Repeat(inner, _, most) => {
                let mut after = after.clone();
                if *most != Some(1) {
                    join(&mut after, &self.begin(inner).1);
                }
                self.follow(inner, &after)
            }
        }
    }
}
