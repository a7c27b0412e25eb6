//! Grammars as llama.cpp writes them (GBNF), which vLLM and SGLang take as EBNF: `root ::= "a" [0-9]+ other`. Read here;
//! gbnf_lark.rs writes them as the library has it.

use std::collections::HashMap;

use crate::border::{invalid, Error, Result};

/// Characters: ranges in order, none touching the next.
pub type Set = Vec<(u32, u32)>;

#[derive(Clone)]
pub enum Node {
    Chars(Set),
    Text(String),
    Rule(usize),
    Token(String), // <think>, <[12]>
    Seq(Vec<Node>),
    Any(Vec<Node>),
    Repeat(Box<Node>, u32, Option<u32>),
}

pub struct Gbnf {
    pub rules: Vec<Node>,
    pub root: usize,
}

/// Whether the text begins as a rule does, which no Lark grammar does.
pub fn is_gbnf(text: &str) -> bool {
    let mut reader = Reader::new(text);
    reader.blanks();
    reader.at_rule()
}

pub fn parse(text: &str) -> Result<Gbnf> {
    let mut reader = Reader::new(text);
    let mut rules: Vec<Option<Node>> = Vec::new();
    loop {
        reader.blanks();
        if reader.peek().is_none() {
            break;
        }
        if !reader.at_rule() {
            return Err(reader.wrong("expected a rule, as in: name ::= \"text\""));
        }
        let name = reader.name();
        reader.blanks();
        reader.at += 3; // "::="
        let rule = reader.rule(&name);
        let body = reader.alternatives()?;
        rules.resize(reader.names.len().max(rules.len()), None);
        if rules[rule].replace(body).is_some() {
            return Err(invalid(format!("the grammar has two rules '{name}'")));
        }
    }
    rules.resize(reader.names.len(), None);
    let Some(&root) = reader.names.get("root").filter(|&&r| rules[r].is_some()) else {
        return Err(invalid("the grammar has no rule 'root', with which it begins"));
    };
    if let Some((name, _)) = reader.names.iter().find(|(_, &r)| rules[r].is_none()) {
        return Err(invalid(format!("the grammar has no rule '{name}', which another names")));
    }
    Ok(Gbnf { rules: rules.into_iter().flatten().collect(), root })
}

struct Reader {
    text: Vec<char>,
    at: usize,
    names: HashMap<String, usize>,
}

fn in_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || "-_.".contains(c)
}

impl Reader {
    fn new(text: &str) -> Reader {
        Reader { text: text.chars().collect(), at: 0, names: HashMap::new() }
    }

    fn peek(&self) -> Option<char> {
        self.text.get(self.at).copied()
    }

    fn wrong(&self, what: &str) -> Error {
        let line = 1 + self.text[..self.at.min(self.text.len())].iter().filter(|&&c| c == '\n').count();
        invalid(format!("the grammar is wrong in line {line}: {what}"))
    }

    fn blanks(&mut self) {
        while let Some(c) = self.peek() {
            if c == '#' {
                while self.peek().is_some_and(|c| c != '\n') {
                    self.at += 1;
                }
            } else if c.is_whitespace() {
                self.at += 1;
            } else {
                break;
            }
        }
    }

    fn name(&mut self) -> String {
        let begin = self.at;
        while self.peek().is_some_and(in_name) {
            self.at += 1;
        }
        self.text[begin..self.at].iter().collect()
    }

    fn rule(&mut self, name: &str) -> usize {
        let next = self.names.len();
        *self.names.entry(name.to_string()).or_insert(next)
    }

    /// A name and `::=` stand here: the rule before is over, whatever lines it took.
    fn at_rule(&mut self) -> bool {
        let here = self.at;
        let named = !self.name().is_empty();
        self.blanks();
        let head = named && self.text[self.at..].starts_with(&[':', ':', '=']);
        self.at = here;
        head
    }

    fn alternatives(&mut self) -> Result<Node> {
        let mut all = vec![self.sequence()?];
        while self.peek() == Some('|') {
            self.at += 1;
            all.push(self.sequence()?);
        }
        Ok(if all.len() == 1 { all.remove(0) } else { Node::Any(all) })
    }

    fn sequence(&mut self) -> Result<Node> {
        let mut all = Vec::new();
        loop {
            self.blanks();
            match self.peek() {
                None | Some('|') | Some(')') => break,
                Some(c) if in_name(c) && self.at_rule() => break,
                _ => all.push(self.repeated()?),
            }
        }
        Ok(if all.len() == 1 { all.remove(0) } else { Node::Seq(all) })
    }

    fn repeated(&mut self) -> Result<Node> {
        let mut node = self.item()?;
        loop {
            self.blanks();
            let (least, most) = match self.peek() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => self.counts()?,
                _ => return Ok(node),
            };
            self.at += 1;
            node = if most == Some(0) { Node::Seq(vec![]) } else { Node::Repeat(Box::new(node), least, most) };
        }
    }

    /// {2}, {2,} or {2,5}, up to its last bracket.
    fn counts(&mut self) -> Result<(u32, Option<u32>)> {
        let begin = self.at + 1;
        while self.peek().is_some_and(|c| c != '}') {
            self.at += 1;
        }
        let inner: String = self.text[begin.min(self.at)..self.at].iter().filter(|c| !c.is_whitespace()).collect();
        let number = |s: &str| s.parse::<u32>().ok().filter(|&n| n < i32::MAX as u32);
        let counts = match inner.split_once(',') {
            None => number(&inner).map(|n| (n, Some(n))),
            Some((least, "")) => number(least).map(|n| (n, None)),
            Some((least, most)) => number(least).zip(number(most)).map(|(n, m)| (n, Some(m))),
        };
        match counts {
            Some((least, most)) if self.peek().is_some() && most.map_or(true, |m| m >= least) => Ok((least, most)),
            _ => Err(self.wrong("a count must be {2}, {2,} or {2,5}")),
        }
    }

    fn item(&mut self) -> Result<Node> {
        match self.peek() {
            Some('"') => self.quoted(),
            Some('[') => self.class(),
            Some('(') => {
                self.at += 1;
                let inner = self.alternatives()?;
                if self.peek() != Some(')') {
                    return Err(self.wrong("a bracket is not closed"));
                }
                self.at += 1;
                Ok(inner)
            }
            Some('.') if !self.text.get(self.at + 1).copied().is_some_and(in_name) => {
                self.at += 1;
                Ok(Node::Chars(without(vec![])))
            }
            Some('<') => {
                let begin = self.at;
                while self.peek().is_some_and(|c| c != '>' && !c.is_whitespace()) {
                    self.at += 1;
                }
                if self.peek() != Some('>') || self.at == begin + 1 {
                    return Err(self.wrong("a special token is written <name> or <[12]>"));
                }
                self.at += 1;
                Ok(Node::Token(self.text[begin..self.at].iter().collect()))
            }
            Some(c) if in_name(c) => {
                let name = self.name();
                Ok(Node::Rule(self.rule(&name)))
            }
            Some(c) => Err(self.wrong(&format!("'{}' stands for nothing here", c.escape_debug()))),
            None => Err(self.wrong("it ends too early")),
        }
    }

    fn quoted(&mut self) -> Result<Node> {
        self.at += 1;
        let mut text = String::new();
        loop {
            match self.peek() {
                None | Some('\n') => return Err(self.wrong("a text is not closed")),
                Some('"') => break,
                _ => text.push(self.character()?),
            }
        }
        self.at += 1;
        Ok(Node::Text(text))
    }

    fn class(&mut self) -> Result<Node> {
        self.at += 1;
        let not = self.peek() == Some('^');
        self.at += usize::from(not);
        let mut set = Set::new();
        loop {
            match self.peek() {
                None => return Err(self.wrong("a class is not closed by ]")),
                Some(']') => break,
                _ => {}
            }
            let first = self.character()? as u32;
            let range = self.peek() == Some('-') && self.text.get(self.at + 1).is_some_and(|&c| c != ']');
            let last = if range {
                self.at += 1;
                self.character()? as u32
            } else {
                first
            };
            if last < first {
                return Err(self.wrong("a range of a class ends before it begins"));
            }
            set.push((first, last));
        }
        self.at += 1;
        let set = if not { without(set) } else { sorted(set) };
        if set.is_empty() {
            return Err(self.wrong("a class has no character"));
        }
        Ok(Node::Chars(set))
    }

    /// One character of a text or a class, escaped or not.
    fn character(&mut self) -> Result<char> {
        let plain = self.peek().ok_or_else(|| self.wrong("it ends too early"))?;
        self.at += 1;
        if plain != '\\' {
            return Ok(plain);
        }
        let escape = self.peek().ok_or_else(|| self.wrong("it ends too early"))?;
        self.at += 1;
        let digits = match escape {
            'n' => return Ok('\n'),
            'r' => return Ok('\r'),
            't' => return Ok('\t'),
            '\\' | '"' | '\'' | '[' | ']' | '-' | '^' | '/' | '.' => return Ok(escape),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            _ => return Err(self.wrong(&format!("'\\{}' stands for nothing", escape.escape_debug()))),
        };
        let hex: String = self.text.iter().skip(self.at).take(digits).collect();
        self.at += digits;
        let good = hex.len() == digits && hex.chars().all(|c| c.is_ascii_hexdigit());
        let code = if good { u32::from_str_radix(&hex, 16).ok() } else { None };
        code.and_then(char::from_u32).ok_or_else(|| {
            self.wrong(&format!("\\{escape} must be followed by {digits} hexadecimal digits of a character"))
        })
    }
}

pub fn sorted(mut set: Set) -> Set {
    set.sort_unstable();
    let mut out = Set::new();
    for (first, last) in set {
        match out.last_mut() {
            Some(before) if first <= before.1.saturating_add(1) => before.1 = before.1.max(last),
            _ => out.push((first, last)),
        }
    }
    out
}

/// All other characters.
fn without(set: Set) -> Set {
    let mut taken = set;
    taken.push((0xD800, 0xDFFF)); // no characters
    let mut out = Set::new();
    let mut next = 0;
    for (first, last) in sorted(taken) {
        if first > next {
            out.push((next, first - 1));
        }
        next = last + 1;
    }
    if next <= char::MAX as u32 {
        out.push((next, char::MAX as u32));
    }
    out
}
