//! Chat templates: Jinja as Hugging Face runs it, with fuel and bounds on time, memory and what may come out.

use std::collections::BTreeMap;
use std::time::Duration;

use meter::{Exceeded, Limits};
use minijinja::machinery::{eval, make_string_output, Instructions};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{context, AutoEscape, Environment, ErrorKind, Value};
use serde_json::Value as Json;

use crate::border::{
    give, guard, invalid, take_back, Buf, Error, Result, Str, FAILED_PRECONDITION, INTERNAL, RESOURCE_EXHAUSTED,
};
use crate::date::strftime;
use crate::template_bounds;

const FUEL: u64 = 8_000_000; // instructions; a chat of a thousand messages takes about 150,000
const TIME: Duration = Duration::from_secs(1); // of a processor
const BYTES: i64 = 192 << 20;
const STACK: usize = 256 << 20; // to compile with; address space, only what is used becomes memory
const MAX_SOURCE: usize = 1 << 20;
const MAX_INDENT: usize = 16;
const MAX_WIDTH: usize = 256;
const NEEDLE: &str = "kvasir_needle";
const MAX_JSON: usize = 32 << 20;

pub struct Template {
    instructions: Instructions<'static>, // they and the blocks point into the source
    blocks: BTreeMap<&'static str, Instructions<'static>>,
    _source: Box<str>,
    env: Environment<'static>,
    bos: String,
    eos: String,
    knows: Knows,
}

/// What a template makes of messages, found by trying.
#[derive(Default)]
struct Knows {
    developer: bool,
    text_arguments: bool, // of calls: as text, not as an object
    no_content: bool,     // a message with calls has no content, not an empty one
    parts: bool,          // a content of several parts as it came: the template says so (takes_parts)
}

fn raise_exception(message: String) -> std::result::Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
}

fn strftime_now(format: String) -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    strftime(&format, now.as_secs() as i64, now.subsec_micros())
}

/// How Python's json.dumps is told to write.
struct Dump {
    indent: Option<usize>,
    comma: String,
    colon: String,
    ascii: bool,
}

impl Dump {
    fn string(&self, text: &str, out: &mut String) {
        let quoted = Json::String(text.to_string()).to_string();
        if !self.ascii {
            return out.push_str(&quoted);
        }
        for c in quoted.chars() {
            if c.is_ascii() {
                out.push(c);
            } else {
                c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| *out += &format!("\\u{unit:04x}"));
            }
        }
    }
}

/// JSON as json.dumps writes it: nothing is escaped for HTML.
fn write_json(value: &Json, how: &Dump, depth: usize, out: &mut String) {
    if out.len() > MAX_JSON {
        return; // refused when all is written
    }
    let open = |out: &mut String, depth: usize| {
        if let Some(width) = how.indent {
            out.push('\n');
            out.extend(std::iter::repeat(' ').take(width * depth));
        }
    };
    match value {
        Json::Array(items) if !items.is_empty() => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    out.push_str(&how.comma);
                }
                open(out, depth + 1);
                write_json(item, how, depth + 1, out);
            }
            open(out, depth);
            out.push(']');
        }
        Json::Object(items) if !items.is_empty() => {
            out.push('{');
            for (i, (key, item)) in items.iter().enumerate() {
                if i > 0 {
                    out.push_str(&how.comma);
                }
                open(out, depth + 1);
                how.string(key, out);
                out.push_str(&how.colon);
                write_json(item, how, depth + 1, out);
            }
            open(out, depth);
            out.push('}');
        }
        Json::String(text) => how.string(text, out),
        scalar => out.push_str(&scalar.to_string()),
    }
}

fn tojson(value: Value, kwargs: Kwargs) -> std::result::Result<String, minijinja::Error> {
    let wrong = |what: String| minijinja::Error::new(ErrorKind::InvalidOperation, format!("tojson: {what}"));
    let indent = kwargs.get::<Option<usize>>("indent")?;
    let ascii = kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sorted = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let separators = kwargs.get::<Option<Vec<String>>>("separators")?;
    kwargs.assert_all_used()?;
    if let Some(width) = indent.filter(|&width| width > MAX_INDENT) {
        return Err(wrong(format!("indent is {width}; at most {MAX_INDENT}")));
    }
    let (comma, colon) = match separators.as_deref() {
        Some([comma, colon]) => (comma.clone(), colon.clone()),
        Some(other) => return Err(wrong(format!("separators has {} entries; it must have 2", other.len()))),
        None => (if indent.is_some() { "," } else { ", " }.to_string(), ": ".to_string()),
    };
    template_bounds::bounded(&value)?;
    let mut json = serde_json::to_value(&value).map_err(|e| wrong(e.to_string()))?;
    if sorted {
        json.sort_all_objects();
    }
    let mut out = String::new();
    write_json(&json, &Dump { indent, comma, colon, ascii }, 0, &mut out);
    if out.len() > MAX_JSON {
        return Err(wrong(format!("it would write more than {MAX_JSON} bytes")));
    }
    Ok(out)
}

/// Of our own: the value that a text of JSON stands for; any other text stays as it is.
fn fromjson(text: String) -> Value {
    match serde_json::from_str::<Json>(&text) {
        Ok(json) => Value::from(Serde(&json)),
        Err(_) => Value::from(text),
    }
}

/// Jinja's: a last line break stays, and the first line is not indented unless it is asked.
fn indent(
    text: String,
    width: Option<usize>,
    first: Option<bool>,
    blank: Option<bool>,
    kwargs: Kwargs,
) -> std::result::Result<String, minijinja::Error> {
    let width = width.or(kwargs.get::<Option<usize>>("width")?).unwrap_or(4);
    let first = first.or(kwargs.get::<Option<bool>>("first")?).unwrap_or(false);
    let blank = blank.or(kwargs.get::<Option<bool>>("blank")?).unwrap_or(false);
    kwargs.assert_all_used()?;
    if width > MAX_WIDTH {
        let wrong = format!("indent: width is {width}; at most {MAX_WIDTH}");
        return Err(minijinja::Error::new(ErrorKind::InvalidOperation, wrong));
    }
    let margin = " ".repeat(width);
    let mut out = String::new();
    for (i, line) in text.split('\n').enumerate() {
        let line = line.strip_suffix('\r').unwrap_or(line);
        if i > 0 {
            out.push('\n');
        }
        if (i > 0 || first) && (blank || !line.is_empty()) {
            out.push_str(&margin);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// {% generation %} marks what a model is trained on; it prints its body.
fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let Some(end) = rest[at..].find("%}").map(|e| at + e + 2) else { break };
        let tag = &rest[at..end];
        let word = tag[2..tag.len() - 2].trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace());
        out.push_str(&rest[..at]);
        match word {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = &rest[end..];
    }
    out.push_str(rest);
    out
}

fn explain(e: &minijinja::Error) -> String {
    let mut text = e.detail().map_or_else(|| e.kind().to_string(), String::from);
    if let Some(line) = e.line() {
        text += &format!(" (line {line})");
    }
    let mut source = std::error::Error::source(e);
    while let Some(inner) = source {
        text += &format!(": {inner}");
        source = inner.source();
    }
    text
}

/// What templates expect of messages, from what OpenAI's clients send: text parts become one string, the arguments of
/// a call an object or text, and the developer, where the template knows none, the system.
fn settle(messages: &mut Json, knows: &Knows) {
    let Some(messages) = messages.as_array_mut() else { return };
    for message in messages {
        if !knows.developer && message["role"] == "developer" {
            message["role"] = Json::String("system".into());
        }
        if let Some(parts) = message["content"].as_array().filter(|_| !knows.parts) {
            let texts: Option<Vec<&str>> =
                parts.iter().map(|p| if p["type"] == "text" { p["text"].as_str() } else { None }).collect();
            if let Some(texts) = texts {
                let joined = texts.join("\n");
                message["content"] = Json::String(joined);
            }
        }
        let Some(calls) = message.get_mut("tool_calls").and_then(Json::as_array_mut) else { continue };
        for call in calls.iter_mut() {
            let Some(arguments) = call.get_mut("function").and_then(|f| f.get_mut("arguments")) else { continue };
            let parsed = arguments.as_str().and_then(|text| serde_json::from_str::<Json>(text).ok());
            if let Some(object @ Json::Object(_)) = parsed {
                *arguments = object;
            }
            if knows.text_arguments && arguments.is_object() {
                let mut text = String::new();
                let how = Dump { indent: None, comma: ", ".into(), colon: ": ".into(), ascii: false };
                write_json(arguments, &how, 0, &mut text);
                *arguments = Json::String(text);
            }
        }
        if knows.no_content && !calls.is_empty() && message["content"] == "" {
            message["content"] = Json::Null;
        }
    }
}

impl Template {
    pub fn compile(source: &str, bos: &str, eos: &str) -> Result<Template> {
        if source.trim().is_empty() {
            return Err(Error {
                code: FAILED_PRECONDITION,
                message: "the model has no chat template; give one with --chat-template FILE, or send a plain prompt"
                    .into(),
            });
        }
        if source.len() > MAX_SOURCE {
            return Err(invalid(format!("the chat template has {} bytes; at most {MAX_SOURCE}", source.len())));
        }
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        let syntax = syntax.map_err(|e| invalid(explain(&e)))?;
        env.set_auto_escape_callback(|_| AutoEscape::None);
        env.set_fuel(Some(FUEL));
        env.add_function("raise_exception", raise_exception);
        env.add_function("strftime_now", strftime_now);
        env.add_filter("tojson", tojson);
        env.add_filter("fromjson", fromjson);
        env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
        template_bounds::install(&mut env);
        env.add_filter("native indent", indent); // behind the bounds on what may be asked of it
        let source = without_generation_marks(source).into_boxed_str();
        // What is compiled goes before the source does, and neither is moved out of the template.
        let text: &'static str = unsafe { &*std::ptr::from_ref(&*source) };
        let (instructions, blocks) = compile_with_stack(text, syntax)?
            .map_err(|e| invalid(format!("the chat template does not compile: {}", explain(&e))))?;
        let writes_calls = source.contains("tool_calls");
        let knows = Knows {
            developer: source.contains("developer"),
            parts: source.contains("set takes_parts = true"),
            ..Knows::default()
        };
        let mut template = Template {
            instructions,
            blocks,
            _source: source,
            env,
            bos: bos.to_string(),
            eos: eos.to_string(),
            knows,
        };
        if writes_calls {
            template.try_calls();
        }
        Ok(template)
    }

    /// Which form of a call the template writes out; where none is, or many are, the usual one.
    fn try_calls(&mut self) {
        for (text_arguments, no_content) in [(false, false), (false, true), (true, false), (true, true)] {
            self.knows.text_arguments = text_arguments;
            self.knows.no_content = no_content;
            let call = format!(
                r#"{{"id":"abcdefghi","type":"function","function":{{"name":"f","arguments":{{"{NEEDLE}":1}}}}}}"#
            );
            let messages =
                format!(r#"[{{"role":"user","content":"x"}},{{"role":"assistant","content":"","tool_calls":[{call}]}}]"#);
            let tools = r#"[{"type":"function","function":{"name":"f","description":"x","parameters":{"type":"object","properties":{}}}}]"#;
            match self.render(&messages, tools, false, "") {
                Ok(text) if String::from_utf8_lossy(&text).contains(NEEDLE) => return,
                // It would take as much in the other forms.
                Err(e) if e.code == RESOURCE_EXHAUSTED => break,
                _ => {}
            }
        }
        self.knows.text_arguments = false;
        self.knows.no_content = false;
    }

    pub fn render(&self, messages: &str, tools: &str, add_generation_prompt: bool, extra: &str) -> Result<Vec<u8>> {
        let parse = |what: &str, text: &str| -> Result<Option<Json>> {
            if text.trim().is_empty() {
                return Ok(None);
            }
            serde_json::from_str(text).map(Some).map_err(|e| invalid(format!("{what} is not JSON: {e}")))
        };
        let mut messages = parse("messages", messages)?.unwrap_or(Json::Array(Vec::new()));
        if !messages.is_array() {
            return Err(invalid("messages must be a list"));
        }
        settle(&mut messages, &self.knows);
        let tools = match parse("tools", tools)? {
            Some(Json::Array(tools)) if tools.is_empty() => None,
            Some(Json::Null) => None,
            other => other,
        };
        let extra = match parse("chat_template_kwargs", extra)? {
            None => Json::Object(Default::default()),
            Some(extra @ Json::Object(_)) => extra,
            Some(_) => return Err(invalid("chat_template_kwargs must be an object")),
        };
        let context = context! {
            messages => Value::from(Serde(&messages)),
            tools => tools.as_ref().map_or(Value::from(()), |tools| Value::from(Serde(tools))),
            add_generation_prompt => add_generation_prompt,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
            ..Value::from(Serde(&extra)),
        };
        let limits = Limits { time: TIME, bytes: BYTES, stopped: &|| false };
        template_bounds::begin();
        let (rendered, _) = meter::within(&limits, || {
            let mut text = String::new();
            let mut out = make_string_output(&mut text);
            eval(&self.env, &self.instructions, context, &self.blocks, &mut out, AutoEscape::None)?;
            drop(out);
            Ok(text)
        });
        let too_much = |what: String| Error {
            code: RESOURCE_EXHAUSTED,
            message: format!("the chat template {what} without ending; simplify it"),
        };
        let rendered = rendered.map_err(|exceeded| match exceeded {
            Exceeded::Bytes => too_much(format!("took {} MiB of memory", BYTES >> 20)),
            _ => too_much(format!("took {} s of a processor", TIME.as_secs())),
        })?;
        rendered.map(String::into_bytes).map_err(|e: minijinja::Error| match e.kind() {
            ErrorKind::OutOfFuel => too_much(format!("ran for {FUEL} instructions")),
            _ => Error {
                code: border_code(&e),
                message: format!("the chat template refused these messages: {}", explain(&e)),
            },
        })
    }
}

type Compiled = (Instructions<'static>, BTreeMap<&'static str, Instructions<'static>>);

fn compile_with_stack(
    source: &'static str,
    syntax: SyntaxConfig,
) -> Result<std::result::Result<Compiled, minijinja::Error>> {
    let compiling = std::thread::Builder::new()
        .stack_size(STACK)
        .spawn(move || template_bounds::compile("chat", source, syntax))
        .map_err(|e| Error { code: INTERNAL, message: format!("no thread to compile the chat template: {e}") })?;
    compiling.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn border_code(e: &minijinja::Error) -> i32 {
    match e.kind() {
        ErrorKind::WriteFailure => RESOURCE_EXHAUSTED,
        _ => crate::border::INVALID_ARGUMENT,
    }
}

#[no_mangle]
pub unsafe extern "C" fn kvt_template_compile(
    source: Str,
    bos: Str,
    eos: Str,
    out: *mut *mut Template,
    error: *mut Buf,
) -> i32 {
    guard(error, || {
        give(out, Template::compile(source.text("the chat template")?, bos.text("bos")?, eos.text("eos")?)?);
        Ok(())
    })
}

#[no_mangle]
pub unsafe extern "C" fn kvt_template_free(t: *mut Template) {
    take_back(t)
}

#[no_mangle]
pub unsafe extern "C" fn kvt_template_render(
    t: *const Template,
    messages: Str,
    tools: Str,
    add_generation_prompt: u8,
    extra: Str,
    out: *mut Buf,
) -> i32 {
    guard(out, || {
        let text = (*t).render(
            messages.text("messages")?,
            tools.text("tools")?,
            add_generation_prompt != 0,
            extra.text("chat_template_kwargs")?,
        )?;
        out.write(Buf::of(text));
        Ok(())
    })
}
