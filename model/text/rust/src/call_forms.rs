//! How each family writes a call, as Lark's rules: what stands behind the tag that opens it.

use serde::Deserialize;
use serde_json::Value;

use crate::border::{invalid, Result};
use crate::call_values::{Syntax, Values};
use crate::calls::{escaped, literal, Calls, Only, Tool};
use crate::schema;

#[derive(Clone, Copy, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// `<tool_call>{...}</tool_call>` anywhere in the text, any number of them.
    Hermes,
    /// The whole answer is an object, or several with ';' between.
    Llama3,
    /// The whole answer is a list of Python's calls.
    Pythonic,
    Xml,
    Seed,
    Glm,
    Mistral,
    List,
    Functools,
    Deepseek,
    Kimi,
    Minimax,
    Gemma,
    Olmo,
}

pub struct Opening {
    pub text: &'static str,
    /// There is a tag that closes it, and text may follow.
    pub closes: bool,
    /// Several calls are several blocks; else one block has them all.
    pub repeats: bool,
}

/// How a form that quotes nothing writes a parameter.
struct Parameter {
    open: &'static str,
    /// Behind the key, up to the value.
    value: &'static str,
    /// Before the closing tag, and the tag.
    line: &'static str,
    close: &'static str,
    after: &'static str,
}

impl Form {
    pub fn opening(self) -> Opening {
        let of = |text, closes, repeats| Opening { text, closes, repeats };
        match self {
            Form::Hermes | Form::Llama3 | Form::Pythonic | Form::Xml | Form::Glm => of("<tool_call>", true, true),
            Form::Seed => of("<seed:tool_call>", true, true),
            Form::Mistral => of("[TOOL_CALLS]", false, true),
            Form::List => of("<|tool_call|>", false, false),
            Form::Functools => of("functools[", false, false),
            Form::Deepseek => of("<｜tool▁calls▁begin｜>", true, false),
            Form::Kimi => of("<|tool_calls_section_begin|>", true, false),
            Form::Minimax => of("<minimax:tool_call>", true, false),
            Form::Gemma => of("<|tool_call>", true, true),
            Form::Olmo => of("<function_calls>", true, false),
        }
    }

    fn parameter(self) -> Parameter {
        let (open, value, line, close, after) = match self {
            Form::Xml => ("<parameter=", r#"">\n""#, "\n", "</parameter>", r#""\n""#),
            Form::Seed => ("<parameter=", r#"">""#, "", "</parameter>", r#""\n""#),
            Form::Minimax => ("<parameter name=\"", r#""\">""#, "", "</parameter>", r#""\n""#),
            _ => ("<arg_key>", r#""</arg_key>" "\n"? "<arg_value>""#, "", "</arg_value>", r#""\n"?"#),
        };
        Parameter { open, value, line, close, after }
    }
}

/// A tag as the vocabulary has it: a token of its own, or text.
pub fn tag(text: &str, specials: &[(u32, &str)]) -> String {
    let special = specials.iter().find(|(_, special)| *special == text);
    special.map_or_else(|| literal(text), |(id, _)| format!("<[{id}]>"))
}

/// The rule `body`: all that follows the tag that opens a block, and what it needs.
pub fn body(calls: &Calls, specials: &[(u32, &str)]) -> Result<String> {
    let tag = |text: &str| tag(text, specials);
    let several = |item: &str, between: &str| match calls.only {
        Some(Only::One) => item.to_string(),
        _ => format!("{item} ({between} {item})*"),
    };
    let each = |write: &dyn Fn(usize, &Tool) -> String| -> String {
        let options: Vec<String> = calls.tools.iter().enumerate().map(|(i, tool)| write(i, tool)).collect();
        options.join("\n  | ")
    };
    let list = format!("WS? \"[\" WS? {} WS? \"]\"", several("object", "WS? \",\" WS?"));
    let object = "object: \"{\" WS? named \"}\"\n".to_string() + &named(calls, "arguments");
    Ok(match calls.form {
        Form::Hermes | Form::Llama3 | Form::Pythonic => {
            let (inside, rules) = match calls.only {
                Some(_) => ("named", String::new()),
                None => ("any_order", any_order(calls)),
            };
            let body = format!("body: WS? \"{{\" WS? {inside} \"}}\" WS? \"</tool_call>\"\n");
            body + &rules + &named(calls, "arguments") + &arguments(calls)?
        }
        Form::Mistral => {
            let by_name = each(&|i, tool| format!("{} {} args_{i}", literal(&tool.name), tag("[ARGS]")));
            format!("body: {list} | by_name\nby_name: {by_name}\n{object}") + &arguments(calls)?
        }
        Form::List => format!("body: {list} (WS? {})?\n{object}", tag("<|/tool_call|>")) + &arguments(calls)?,
        Form::Functools => {
            format!("body: WS? {} WS? \"]\"\n{object}", several("object", "WS? \",\" WS?")) + &arguments(calls)?
        }
        Form::Deepseek => {
            let fenced = |i, tool: &Tool| {
                let head = literal(&format!("{}\n```json\n", tool.name));
                format!("\"function\" {} {head} args_{i} \"\\n```\"", tag("<｜tool▁sep｜>"))
            };
            let bare = |i, tool: &Tool| format!("{} {} args_{i}", literal(&tool.name), tag("<｜tool▁sep｜>"));
            let written = each(&|i, tool| fenced(i, tool) + "\n  | " + &bare(i, tool));
            let (begin, end) = (tag("<｜tool▁call▁begin｜>"), tag("<｜tool▁call▁end｜>"));
            let body = format!("body: {} {}\n", several("one", "WS?"), tag("<｜tool▁calls▁end｜>"));
            format!("{body}one: {begin} written {end}\nwritten: {written}\n") + &arguments(calls)?
        }
        Form::Kimi => {
            let middle = tag("<|tool_call_argument_begin|>");
            let written = each(&|i, tool| {
                format!("{} NUMBER {middle} args_{i}", literal(&format!("functions.{}:", tool.name)))
            });
            let (begin, end) = (tag("<|tool_call_begin|>"), tag("<|tool_call_end|>"));
            let body = format!("body: {} {}\n", several("one", ""), tag("<|tool_calls_section_end|>"));
            format!("{body}one: {begin} written {end}\nwritten: {written}\nNUMBER: /[0-9]{{1,4}}/\n") + &arguments(calls)?
        }
        Form::Minimax => {
            let one = each(&|i, tool| {
                format!("{} params_{i} \"</invoke>\\n\"", literal(&format!("<invoke name=\"{}\">\n", tool.name)))
            });
            let body = format!("body: \"\\n\" {} {}\n", several("one", ""), tag("</minimax:tool_call>"));
            format!("{body}one: {one}\n") + &parameters(calls)?
        }
        Form::Gemma => {
            let (one, rules) = own_values(calls, Syntax::Gemma, ["{", "}"], specials)?;
            format!("body: \"call:\" one {}\none: {one}\n{rules}", tag("<tool_call|>"))
        }
        Form::Olmo => {
            let (one, rules) = own_values(calls, Syntax::Python, ["(", ")"], specials)?;
            let all = several("one", "\"\\n\"");
            format!("body: \"\\n\"? {all} \"\\n\"? {}\none: {one}\n{rules}", tag("</function_calls>"))
        }
        Form::Glm => {
            let one = each(&|i, tool| format!("{} \"\\n\"? params_{i}", literal(&tool.name)));
            format!("body: one \"</tool_call>\"\none: {one}\n") + &parameters(calls)?
        }
        Form::Xml | Form::Seed => {
            let one = each(&|i, tool| {
                format!("{} params_{i} \"</function>\\n\"", literal(&format!("\n<function={}>\n", tool.name)))
            });
            let close = if calls.form == Form::Xml { "</tool_call>" } else { "</seed:tool_call>" };
            format!("body: one {}\none: {one}\n", tag(close)) + &parameters(calls)?
        }
    })
}

/// A call of any tool with its arguments between two brackets, in a syntax of the family's own, and the rules it needs.
fn own_values(calls: &Calls, syntax: Syntax, [open, close]: [&str; 2], specials: &[(u32, &str)]) -> Result<(String, String)> {
    let mut values = Values::new(syntax, specials);
    let mut all = Vec::new();
    for tool in &calls.tools {
        let arguments = values.arguments(tool)?;
        all.push(format!("{} {arguments} {}", literal(&format!("{}{open}", tool.name)), literal(close)));
    }
    Ok((all.join("\n  | "), values.rules()))
}

/// `args_N`, the JSON of each tool's arguments.
pub fn arguments(calls: &Calls) -> Result<String> {
    let mut out = String::new();
    for (i, tool) in calls.tools.iter().enumerate() {
        out += &format!("args_{i}: %json {}\n", prepared(i, tool, tool.parameters.clone())?);
    }
    Ok(out)
}

fn prepared(i: usize, tool: &Tool, schema: Value) -> Result<Value> {
    schema::prepare(schema)
        .map_err(|e| invalid(format!("the parameters of tool {i} ({:?}): {}", tool.name, e.message)))
}

/// What stands inside an object's braces: `named` when the name comes first, and `after_name`.
pub fn named(calls: &Calls, key: &str) -> String {
    let options: Vec<String> = (calls.tools.iter().enumerate())
        .map(|(i, tool)| format!("WS? \":\" WS? {} WS? \",\" WS? {}", quoted(&tool.name), keyed(i, key)))
        .collect();
    format!("named: \"\\\"name\\\"\" after_name\nafter_name: {}\n", options.join("\n  | "))
}

/// Also when the arguments come first.
fn any_order(calls: &Calls) -> String {
    let options: Vec<String> = (calls.tools.iter().enumerate())
        .map(|(i, tool)| format!("{} \",\" WS? \"\\\"name\\\"\" WS? \":\" WS? {} WS?", keyed(i, "arguments"), quoted(&tool.name)))
        .collect();
    format!("any_order: named\n  | {}\n", options.join("\n  | "))
}

fn quoted(name: &str) -> String {
    literal(&Value::String(name.to_string()).to_string())
}

fn keyed(i: usize, key: &str) -> String {
    format!("{} WS? \":\" WS? args_{i} WS?", literal(&format!("\"{key}\"")))
}

/// `params_N`: each tool's parameters in the order of its schema, the optional ones or not; any, where it lists none.
fn parameters(calls: &Calls) -> Result<String> {
    let form = calls.form.parameter();
    let (mut out, mut any) = (String::new(), false);
    for (i, tool) in calls.tools.iter().enumerate() {
        let Some(listed) = tool.parameters.get("properties").and_then(Value::as_object) else {
            let none = tool.parameters.get("additionalProperties") == Some(&Value::Bool(false));
            any |= !none;
            out += &format!("params_{i}: {}\n", if none { "\"\"" } else { "any*" });
            continue;
        };
        let required = |key: &str| {
            let list = tool.parameters.get("required").and_then(Value::as_array);
            list.is_some_and(|list| list.iter().any(|name| name == key))
        };
        let mut all = Vec::new();
        for (j, (key, schema)) in listed.iter().enumerate() {
            all.push(format!("param_{i}_{j}{}", if required(key) { "" } else { "?" }));
            let open = literal(&format!("{}{key}", form.open));
            let (value, rules) = if tool.texts.contains(key) {
                text_value(&format!("text_{i}_{j}"), schema, calls.form)
            } else {
                let mut schema = schema.clone();
                for defs in ["$defs", "definitions"] {
                    if let (Some(defined), Some(own)) = (tool.parameters.get(defs), schema.as_object_mut()) {
                        own.insert(defs.into(), defined.clone());
                    }
                }
                let close = literal(&format!("{}{}", form.line, form.close));
                let json = prepared(i, tool, schema)?;
                (format!("value_{i}_{j} {close}"), format!("value_{i}_{j}: %json {json}\n"))
            };
            out += &format!("param_{i}_{j}: {open} {} {value} {}\n{rules}", form.value, form.after);
        }
        out += &format!("params_{i}: {}\n", if all.is_empty() { "\"\"".into() } else { all.join(" ") });
    }
    if any {
        let (value, rules) = text_value("any_text", &Value::Null, calls.form);
        out += &format!("any: {} KEY {} {value} {}\n{rules}", literal(form.open), form.value, form.after);
        out += "KEY: /[^ \\n\\r\\t\"<>{}()\\[\\]]{1,256}/\n";
    }
    Ok(out)
}

/// A text up to the first tag that closes it, of the length or among the texts that the schema allows: what it is, and a
/// terminal for that.
fn text_value(terminal: &str, schema: &Value, form: Form) -> (String, String) {
    let Parameter { line, close, .. } = form.parameter();
    let end = literal(&format!("{line}{close}"));
    let choices = match (schema.get("const"), schema.get("enum").and_then(Value::as_array)) {
        (Some(one), _) => Some(vec![one]),
        (None, list) => list.map(|list| list.iter().collect()),
    };
    if let Some(choices) = choices {
        let texts: Vec<String> = choices.iter().filter_map(|c| c.as_str()).map(literal).collect();
        return (format!("({}) {end}", texts.join(" | ")), String::new());
    }
    let bound = |key: &str| schema.get(key).and_then(Value::as_u64);
    let count = match (bound("minLength"), bound("maxLength")) {
        (None, None) => "*".to_string(),
        (least, most) => format!("{{{},{}}}", least.unwrap_or(0), most.map_or(String::new(), |m| m.to_string())),
    };
    let (line, close) = (line.replace('\n', "\\n"), escaped(close));
    let mut rule = format!("{terminal}[lazy]: /(.|\\n){count}{line}{close}/ & ~/(.|\\n)*{close}(.|\\n)+/");
    if form == Form::Seed {
        // A reader takes line breaks at either end for the layout's.
        rule += &format!(" & ~/\\n(.|\\n)*/ & ~/(.|\\n)*\\n{close}/");
    }
    (terminal.to_string(), rule + "\n")
}
