//! GBNF as the library's Lark. GBNF is of characters; the library splits a text into lexemes first, each as long as it can
//! be. So what refers to no recursive rule becomes one lexeme, a regular expression, where the longest reading is the only
//! one; where it might not be, its characters are lexemes each, which is slower to follow and always exact.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::border::{invalid, Result};
use crate::calls::literal;
use crate::gbnf::{self, Gbnf, Node, Set};

const ROUNDS: usize = 4;

/// `token`: how Lark says a token that the grammar names, as "<think>"; None: there is none such.
pub fn lark(text: &str, token: &dyn Fn(&str) -> Option<String>) -> Result<String> {
    let mut grammar = gbnf::parse(text)?;
    for rule in &mut grammar.rules {
        name_tokens(rule, token)?;
    }
    let regular = regular_rules(&grammar);
    let mut split = Split { all: false, lexemes: HashSet::new() };
    for round in 0.. {
        let mut lowering = Lowering::new(&grammar, &regular, &split);
        lowering.run();
        let unsafe_ones = lowering.ambiguous();
        if unsafe_ones.is_empty() {
            return Ok(lowering.text());
        }
        split.lexemes.extend(unsafe_ones);
        split.all = round >= ROUNDS;
    }
    unreachable!()
}

fn name_tokens(node: &mut Node, token: &dyn Fn(&str) -> Option<String>) -> Result<()> {
    match node {
        Node::Token(name) if name.starts_with("<[") => Ok(()),
        Node::Token(name) => {
            *name = token(name)
                .ok_or_else(|| invalid(format!("the grammar names {name}, which is no token of this model")))?;
            Ok(())
        }
        Node::Seq(all) | Node::Any(all) => all.iter_mut().try_for_each(|n| name_tokens(n, token)),
        Node::Repeat(inner, ..) => name_tokens(inner, token),
        Node::Chars(_) | Node::Text(_) | Node::Rule(_) => Ok(()),
    }
}

/// What is known of a rule that reaches neither itself nor a special token; None of the others.
pub type Known = Vec<Option<Words>>;

/// The words of a regular expression: whether the empty one is among them, and the only one.
#[derive(Clone, Copy)]
pub struct Words {
    pub empty: bool,
    pub only_empty: bool,
}

fn regular_rules(grammar: &Gbnf) -> Known {
    let mut known: Known = vec![None; grammar.rules.len()];
    loop {
        let mut more = false;
        for (r, body) in grammar.rules.iter().enumerate() {
            if known[r].is_none() {
                known[r] = words(body, &known);
                more |= known[r].is_some();
            }
        }
        if !more {
            return known;
        }
    }
}

/// None: it is not regular.
fn words(node: &Node, rules: &Known) -> Option<Words> {
    let all_of = |all: &[Node]| all.iter().map(|n| words(n, rules)).collect::<Option<Vec<_>>>();
    Some(match node {
        Node::Chars(_) => Words { empty: false, only_empty: false },
        Node::Text(text) => Words { empty: text.is_empty(), only_empty: text.is_empty() },
        Node::Rule(r) => return rules[*r],
        Node::Token(_) => return None,
        Node::Seq(all) => {
            let all = all_of(all)?;
            Words { empty: all.iter().all(|w| w.empty), only_empty: all.iter().all(|w| w.only_empty) }
        }
        Node::Any(all) => {
            let all = all_of(all)?;
            Words { empty: all.iter().any(|w| w.empty), only_empty: all.iter().all(|w| w.only_empty) }
        }
        Node::Repeat(inner, least, _) => {
            let inner = words(inner, rules)?;
            Words { empty: inner.empty || *least == 0, only_empty: inner.only_empty }
        }
    })
}

fn is_regular(node: &Node, rules: &Known) -> bool {
    match node {
        Node::Chars(_) | Node::Text(_) => true,
        Node::Rule(r) => rules[*r].is_some(),
        Node::Token(_) => false,
        Node::Seq(all) | Node::Any(all) => all.iter().all(|n| is_regular(n, rules)),
        Node::Repeat(inner, ..) => is_regular(inner, rules),
    }
}

pub struct Split {
    all: bool,
    lexemes: HashSet<String>,
}

/// The grammar over lexemes.
pub enum Item {
    Lexeme(usize),
    Rule(String),
    Token(String),
    Seq(Vec<Item>),
    Any(Vec<Item>),
    Repeat(Box<Item>, u32, Option<u32>),
}

pub struct Lexeme {
    pub text: String,
    pub node: Node,
    pub character: bool,
}

pub struct Lowering<'a> {
    pub grammar: &'a Gbnf,
    pub regular: &'a Known,
    split: &'a Split,
    pub lexemes: Vec<Lexeme>,
    by_text: HashMap<String, usize>,
    pub rules: BTreeMap<String, Item>,
    wanted: Vec<(String, usize, bool)>, // rules to come: whether by characters
    terminals: BTreeMap<usize, String>, // regular rules that lexemes name
}

impl<'a> Lowering<'a> {
    fn new(grammar: &'a Gbnf, regular: &'a Known, split: &'a Split) -> Self {
        Lowering {
            grammar,
            regular,
            split,
            lexemes: vec![],
            by_text: HashMap::new(),
            rules: BTreeMap::new(),
            wanted: vec![],
            terminals: BTreeMap::new(),
        }
    }

    fn run(&mut self) {
        self.want(self.grammar.root, false);
        while let Some((name, rule, characters)) = self.wanted.pop() {
            if self.rules.contains_key(&name) {
                continue;
            }
            let body = &self.grammar.rules[rule];
            let item = if characters { self.characters(body) } else { self.lower(body) };
            self.rules.insert(name, item);
        }
    }

    fn want(&mut self, rule: usize, characters: bool) -> Item {
        let name = format!("{}{rule}", if characters { 'c' } else { 'r' });
        self.wanted.push((name.clone(), rule, characters));
        Item::Rule(name)
    }

    fn lower(&mut self, node: &Node) -> Item {
        if is_regular(node, self.regular) {
            return self.lexeme(node.clone());
        }
        match node {
            Node::Rule(r) => self.want(*r, false),
            Node::Token(t) => Item::Token(t.clone()),
            Node::Repeat(inner, least, most) => Item::Repeat(Box::new(self.lower(inner)), *least, *most),
            Node::Seq(all) => {
                let mut out = vec![];
                for run in all.chunk_by(|a, b| is_regular(a, self.regular) && is_regular(b, self.regular)) {
                    out.push(self.lower(&if run.len() == 1 { run[0].clone() } else { Node::Seq(run.to_vec()) }));
                }
                Item::Seq(out)
            }
            Node::Any(all) => {
                let (regular, others): (Vec<&Node>, Vec<&Node>) = all.iter().partition(|n| is_regular(n, self.regular));
                let mut out: Vec<Item> = others.into_iter().map(|n| self.lower(n)).collect();
                if !regular.is_empty() {
                    out.push(self.lower(&Node::Any(regular.into_iter().cloned().collect())));
                }
                Item::Any(out)
            }
            Node::Chars(_) | Node::Text(_) => unreachable!(),
        }
    }

    fn lexeme(&mut self, node: Node) -> Item {
        let words = words(&node, self.regular).expect("it is regular");
        if words.only_empty {
            return Item::Seq(vec![]);
        }
        let text = self.terminal(&node);
        if self.split.all || self.split.lexemes.contains(&text) {
            return self.characters(&node);
        }
        let item = self.add(text, node, false);
        if words.empty {
            Item::Repeat(Box::new(item), 0, Some(1))
        } else {
            item
        }
    }

    fn add(&mut self, text: String, node: Node, character: bool) -> Item {
        let next = self.lexemes.len();
        let at = *self.by_text.entry(text.clone()).or_insert(next);
        if at == next {
            self.lexemes.push(Lexeme { text, node, character });
        }
        Item::Lexeme(at)
    }

    fn characters(&mut self, node: &Node) -> Item {
        match node {
            Node::Chars(set) => self.add(class(set), node.clone(), true),
            Node::Text(text) => Item::Seq(
                text.chars()
                    .map(|c| {
                        let one = Node::Chars(vec![(c as u32, c as u32)]);
                        self.characters(&one)
                    })
                    .collect(),
            ),
            Node::Rule(r) => self.want(*r, true),
            Node::Token(t) => Item::Token(t.clone()),
            Node::Seq(all) => Item::Seq(all.iter().map(|n| self.characters(n)).collect()),
            Node::Any(all) => Item::Any(all.iter().map(|n| self.characters(n)).collect()),
            Node::Repeat(inner, least, most) => Item::Repeat(Box::new(self.characters(inner)), *least, *most),
        }
    }

    /// Of a regular node.
    fn terminal(&mut self, node: &Node) -> String {
        match node {
            Node::Chars(set) => class(set),
            Node::Text(text) => literal(text),
            Node::Rule(r) => {
                if !self.terminals.contains_key(r) {
                    let body = self.terminal(&self.grammar.rules[*r]);
                    self.terminals.insert(*r, body);
                }
                format!("T{r}")
            }
            Node::Seq(all) if all.is_empty() => "\"\"".into(),
            Node::Seq(all) => all.iter().map(|n| self.bracketed(n)).collect::<Vec<_>>().join(" "),
            Node::Any(all) => all.iter().map(|n| self.terminal(n)).collect::<Vec<_>>().join(" | "),
            Node::Repeat(inner, least, most) => format!("({}){}", self.terminal(inner), counts(*least, *most)),
            Node::Token(_) => unreachable!(),
        }
    }

    fn bracketed(&mut self, node: &Node) -> String {
        let text = self.terminal(node);
        if matches!(node, Node::Any(_)) {
            format!("({text})")
        } else {
            text
        }
    }

    fn text(&self) -> String {
        let mut out = format!("start: r{}\n", self.grammar.root);
        for (name, item) in &self.rules {
            out += &format!("{name}: {}\n", self.written(item));
        }
        for (i, lexeme) in self.lexemes.iter().enumerate() {
            let empty = words(&lexeme.node, self.regular).is_some_and(|w| w.empty);
            let body = if empty { format!("({}) & /(?s:.)+/", lexeme.text) } else { lexeme.text.clone() };
            out += &format!("L{i}: {body}\n");
        }
        for (rule, body) in &self.terminals {
            out += &format!("T{rule}: {body}\n");
        }
        out
    }

    fn written(&self, item: &Item) -> String {
        let list = |all: &[Item], between: &str| {
            let texts: Vec<String> = all.iter().map(|i| self.written(i)).collect();
            if texts.len() == 1 {
                texts[0].clone()
            } else {
                format!("({})", texts.join(between))
            }
        };
        match item {
            Item::Lexeme(i) => format!("L{i}"),
            Item::Rule(name) | Item::Token(name) => name.clone(),
            Item::Seq(all) if all.is_empty() => "\"\"".into(),
            Item::Seq(all) => list(all, " "),
            Item::Any(all) => list(all, " | "),
            Item::Repeat(inner, least, most) => format!("({}){}", self.written(inner), counts(*least, *most)),
        }
    }
}

fn counts(least: u32, most: Option<u32>) -> String {
    match (least, most) {
        (0, None) => "*".into(),
        (1, None) => "+".into(),
        (0, Some(1)) => "?".into(),
        (n, None) => format!("{{{n},}}"),
        (n, Some(m)) => format!("{{{n},{m}}}"),
    }
}

fn class(set: &Set) -> String {
    let mut out = String::from("/[");
    for (first, last) in set {
        out += &if first == last { format!("\\x{{{first:X}}}") } else { format!("\\x{{{first:X}}}-\\x{{{last:X}}}") };
    }
    out + "]/"
}
