//! What a template may make of its messages. Its fuel counts instructions, and one of them may double a text, nest a list
//! in itself or repeat a value as often as it likes: so the compiled instructions are rewritten to look at each value where
//! it is made, and what makes much of little is asked before.

use minijinja::machinery::{parse, tokenize, CodeGenerator, Instruction, Instructions, Token};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{ObjectRepr, Rest, ValueOrKwargs};
use minijinja::{filters, Environment, Error, ErrorKind, Output, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;
use std::cell::Cell;
use std::collections::BTreeMap;

use crate::border::{invalid, Result};

const MAX_DEPTH: usize = 64;
const MAX_VALUE: usize = 16 << 20; // bytes, with all that it holds, as often as it holds it
const BYTES_A_VALUE: usize = 24; // beside those of a text
const MAX_SPLIT: usize = 4 << 20; // of a text that becomes a list
const MAX_OUTPUT: usize = 64 << 20;
const MAX_WIDTH: i64 = 1_000;
const MAX_COUNT: i64 = 100_000;
/// The parser and all that follow a syntax tree do so by recursion.
const MAX_WORDS: usize = 4_000; // of one tag
const MAX_TAGS: usize = 4_000;

const NO_LOCAL: u8 = !0;
const UNITS_A_VALUE: usize = 256;

type Made<T> = std::result::Result<T, Error>;
type Blocks<'a> = BTreeMap<&'a str, Instructions<'a>>;

thread_local! {
    static WRITTEN: Cell<usize> = const { Cell::new(0) };
}

fn too_large(what: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("{what} more than {MAX_VALUE} bytes"))
}

/// The instructions of `source` and of its blocks. Takes stack by the word: call it where there is much.
pub fn compile<'a>(
    name: &'a str,
    source: &'a str,
    syntax: SyntaxConfig,
) -> Result<Made<(Instructions<'a>, Blocks<'a>)>> {
    check_nesting(source, &syntax)?;
    Ok(parse(source, name, syntax).map(|tree| {
        let mut generator = CodeGenerator::new(name, source);
        generator.compile_stmt(&tree);
        let (instructions, blocks) = generator.finish();
        (watched(&instructions), blocks.iter().map(|(name, block)| (*name, watched(block))).collect())
    }))
}

/// What a tag's words say of the tree that comes of it.
#[derive(Default)]
struct Tag {
    words: usize,
    bytes: usize, // of its texts and words
    product: f64, // of all numbers
    repeats: bool,
    has_lists: bool,
}

impl Tag {
    fn read(&mut self, token: &Token) {
        self.words += 1;
        self.bytes += 16;
        match token {
            Token::Mul => self.repeats = true,
            Token::Pow => self.product = f64::INFINITY,
            Token::Int(n) => self.product *= (*n as f64).max(1.0),
            Token::Int128(n) => self.product *= **n as f64,
            Token::Float(n) => self.product *= n.abs().max(1.0),
            Token::Str(text) => (self.bytes, self.has_lists) = (self.bytes + text.len(), true),
            Token::String(text) => (self.bytes, self.has_lists) = (self.bytes + text.len(), true),
            Token::BracketOpen => self.has_lists = true,
            _ => {}
        }
    }
    /// The parser works out what is constant: texts and lists times numbers among it.
    fn most_bytes(&self) -> f64 {
        self.bytes as f64 * if self.repeats && self.has_lists { self.product } else { 1.0 }
    }
}

fn check_nesting(source: &str, syntax: &SyntaxConfig) -> Result<()> {
    let refused = |what: String| Err(invalid(format!("the chat template does not compile: {what}")));
    let mut tag = Tag::default();
    let (mut tags, mut constant) = (0, 0.0);
    for token in tokenize(source, false, syntax.clone()) {
        match token {
            Ok((Token::VariableStart | Token::BlockStart, _)) => {
                tags += 1;
                tag = Tag { product: 1.0, ..Tag::default() };
            }
            Ok((Token::VariableEnd | Token::BlockEnd, _)) => constant += tag.most_bytes(),
            Ok((token, _)) => tag.read(&token),
            Err(_) => break, // the parser says it better, and reads no further
        }
        if tag.words > MAX_WORDS {
            return refused(format!("a tag has more than {MAX_WORDS} words"));
        }
        if tags > MAX_TAGS {
            return refused(format!("it has more than {MAX_TAGS} tags"));
        }
    }
    if constant > MAX_VALUE as f64 {
        return refused(format!("its constants have more than {MAX_VALUE} bytes"));
    }
    Ok(())
}

/// The same instructions with those between them that look.
fn watched<'a>(from: &Instructions<'a>) -> Instructions<'a> {
    let mut places = Vec::new();
    let mut all = Vec::new();
    for at in 0.. {
        places.push(all.len() as u32);
        let Some(instruction) = from.get(at) else { break };
        let line = from.get_line(at).unwrap_or(0) as u16;
        all.extend(expand(instruction).into_iter().map(|i| (i, line)));
    }
    let mut out = Instructions::new(from.name(), from.source());
    for (mut instruction, line) in all {
        match &mut instruction {
            Instruction::Jump(to)
            | Instruction::JumpIfFalse(to)
            | Instruction::JumpIfFalseOrPop(to)
            | Instruction::JumpIfTrueOrPop(to)
            | Instruction::Iterate(to)
            | Instruction::BuildMacro(_, to, _) => *to = places[*to as usize],
            _ => {}
        }
        out.add_with_line(instruction, line);
    }
    out
}

fn expand<'a>(instruction: &Instruction<'a>) -> Vec<Instruction<'a>> {
    use Instruction::*;
    let this = instruction.clone();
    let filter = |name, arguments| ApplyFilter(name, Some(arguments), NO_LOCAL);
    let pause = CallFunction("work is done", Some(0));
    match instruction {
        EmitRaw(text) => vec![LoadConst(Value::from(*text)), Emit],
        SetAttr(_) => vec![Swap, filter("plain", 1), Swap, this],
        Mul => vec![filter("may be multiplied", 2), UnpackList(2), this, filter("bounded", 1)],
        StringConcat | Add | Slice | EndCapture | BuildList(_) | BuildTuple(_) | BuildMap(_) | ApplyFilter(..)
        | CallFunction(..) | CallMethod(..) | CallObject(_) => vec![this, filter("bounded", 1)],
        Iterate(_) | PerformTest(..) | Eq | Ne | Gt | Gte | Lt | Lte | In | CompareAndPreserve(_) => {
            vec![pause, DiscardTop, this]
        }
        _ => vec![this],
    }
}

/// What those instructions call; no template can, for the spaces in their names or for what they say.
pub fn install(env: &mut Environment) {
    env.add_function("work is done", || meter::charge(UNITS_A_VALUE));
    env.add_filter("bounded", |value: Value| bounded(&value).map(|()| value));
    env.add_filter("plain", |value: Value| plain(&value).map(|()| value));
    env.add_filter("maybemultiplied", |a: Value, b: Value| may_multiply(&a, &b).map(|()| vec![b, a]));
    env.set_formatter(write);
    env.remove_filter("pprint"); // indents by depth, without a bound
    env.add_filter("native replace", filters::replace);
    env.add_filter("native format", filters::format);
    env.add_filter("native join", filters::join);
    env.add_filter("native indent", filters::indent);
    env.add_filter("native batch", filters::batch);
    env.add_filter("native slice", filters::slice);
    env.add_filter("native list", filters::list);
    env.add_filter("native lines", filters::lines);
    env.add_filter("native split", filters::split);
    for name in ["replace", "format", "join", "indent", "batch", "slice", "list", "lines", "split"] {
        let native = format!("native {name}");
        env.add_filter(name, move |state: &mut State, arguments: Rest<ValueOrKwargs>| {
            let arguments = arguments.into_values();
            may_call(name, &arguments)?;
            state.apply_filter(&native, &arguments)
        });
    }
    env.set_unknown_method_callback(|state, value, method, arguments| {
        may_call(method, &[&[value.clone()], arguments].concat())?;
        unknown_method_callback(state, value, method, arguments)
    });
}

pub fn begin() {
    WRITTEN.with(|written| written.set(0));
}

/// Of everything that is printed, into the answer or a variable.
fn write(out: &mut Output, state: &mut State, value: &Value) -> Made<()> {
    let bytes = bounded_weight(value)?;
    let written = WRITTEN.with(|written| {
        written.set(written.get() + bytes);
        written.get()
    });
    if written > MAX_OUTPUT {
        return Err(Error::new(ErrorKind::WriteFailure, format!("it wrote more than {MAX_OUTPUT} bytes")));
    }
    minijinja::escape_formatter(out, state, value)
}

pub fn bounded(value: &Value) -> Made<()> {
    bounded_weight(value).map(|_| ())
}

fn bounded_weight(value: &Value) -> Made<usize> {
    let mut bytes = 0;
    let weighed = weigh(value, 0, &mut bytes, &mut |_| Ok(()));
    meter::charge(UNITS_A_VALUE + bytes / 64);
    weighed.map(|()| bytes)
}

/// What may be kept in a namespace: that holds for as long as the template runs, so it holds no namespace, nor a loop,
/// which could come to hold this one.
fn plain(value: &Value) -> Made<()> {
    weigh(value, 0, &mut 0, &mut |object| match object {
        object if object.ends_with("::Namespace") || object.ends_with("::Loop") => {
            Err(Error::new(ErrorKind::InvalidOperation, "a namespace may hold no namespace and no loop"))
        }
        _ => Ok(()),
    })
}

fn weigh(value: &Value, depth: usize, bytes: &mut usize, judge: &mut dyn FnMut(&str) -> Made<()>) -> Made<()> {
    *bytes += BYTES_A_VALUE + value.as_str().map_or(0, str::len);
    if *bytes > MAX_VALUE {
        return Err(too_large("a value has"));
    }
    let Some(object) = value.as_object() else { return Ok(()) };
    judge(object.type_name())?;
    if depth == MAX_DEPTH {
        return Err(Error::new(ErrorKind::InvalidOperation, format!("a value nests more than {MAX_DEPTH} deep")));
    }
    if object.repr() == ObjectRepr::Plain {
        return Ok(());
    }
    for item in value.try_iter()? {
        weigh(&item, depth + 1, bytes, judge)?;
        if object.repr() == ObjectRepr::Map {
            weigh(&value.get_item(&item)?, depth + 1, bytes, judge)?;
        }
    }
    Ok(())
}

fn may_multiply(a: &Value, b: &Value) -> Made<()> {
    for (value, times) in [(a, b), (b, a)] {
        if value.as_str().is_some() || value.as_object().is_some() {
            let times = usize::try_from(times.clone()).unwrap_or(0);
            if bounded_weight(value)?.saturating_mul(times) > MAX_VALUE {
                return Err(too_large("multiplied, a value has"));
            }
        }
    }
    Ok(())
}

/// Of filters and methods that make much of little, by what they are given.
fn may_call(name: &str, arguments: &[Value]) -> Made<()> {
    let text = |at: usize| arguments.get(at).and_then(Value::as_str).unwrap_or("");
    let number = |value: &Value| i64::try_from(value.clone()).unwrap_or(0);
    let refused = |what: &str| Err(Error::new(ErrorKind::InvalidOperation, format!("{name}: {what}")));
    let made = match name {
        "replace" => {
            let times = match text(1) {
                "" => text(0).len() + 1,
                old => text(0).matches(old).count(),
            };
            times.saturating_mul(text(2).len())
        }
        "join" => {
            let (items, separator) = match arguments.first().and_then(Value::as_str) {
                Some(separator) if arguments.get(1).is_some_and(|v| v.as_str().is_none()) => (&arguments[1], separator),
                _ => (arguments.first().unwrap_or(&Value::UNDEFINED), text(1)),
            };
            items.len().unwrap_or(0).saturating_mul(separator.len())
        }
        "format" => {
            let wide = |digits: &str| digits.parse::<i64>().map_or(!digits.is_empty(), |width| width > MAX_WIDTH);
            if text(0).split(|c: char| !c.is_ascii_digit()).any(wide) || text(0).contains('*') {
                return refused("a width may be at most 1000, and must stand in the format");
            }
            0
        }
        "indent" => {
            let named = arguments.last().and_then(|last| last.get_attr("width").ok());
            let width = arguments.iter().skip(1).chain(&named).map(number).max().unwrap_or(0);
            text(0).matches('\n').count().saturating_add(1).saturating_mul(width.max(0) as usize)
        }
        "batch" | "slice" if arguments.iter().skip(1).any(|count| number(count) > MAX_COUNT) => {
            return refused("a count may be at most 100000");
        }
        "list" | "lines" | "split" | "splitlines" if text(0).len() > MAX_SPLIT => {
            return refused("the text is too long to become a list");
        }
        _ => 0,
    };
    meter::charge(text(0).len() / 64);
    if made > MAX_VALUE {
        return Err(too_large("it would make"));
    }
    Ok(())
}
