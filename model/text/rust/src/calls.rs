//! The grammar of answers that may call tools: free text stays free, and from where a call begins its name is one of
//! the tools' and its arguments obey that tool's schema. Which text begins a call is what `tool_parser.cc` takes for one;
//! how each family writes the call itself is `call_forms.rs`.

use serde::Deserialize;
use serde_json::Value;

use crate::border::{invalid, Result};
use crate::call_forms::{self, Form};
use crate::call_values::{Syntax, Values};
use crate::schema;

const MAX_TOOLS: usize = 1024;
const PYTHON_TAG: &str = "<|python_tag|>";
const LLAMA3_NEXT: &str = r#"again: "{" WS? named "}" | "{" WS? "\"type\"" typed "}"
typed: WS? ":" WS? "\"function\"" WS? "," WS? named
"#;

/// Nothing but calls: those that were asked for.
#[derive(Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
pub enum Only {
    One,
    Some,
}

#[derive(Deserialize)]
pub struct Tool {
    pub name: String,
    pub parameters: Value,
    /// Of a form that quotes nothing: which of its parameters are written as bare text.
    #[serde(default)]
    pub texts: Vec<String>,
}

#[derive(Deserialize)]
pub struct Calls {
    pub form: Form,
    pub tools: Vec<Tool>,
    pub only: Option<Only>,
    /// What an answer without calls must be; without it, free text.
    answer: Option<Value>,
}

/// Lark for `text`, a `Calls` as JSON. `specials` are the tokens without a text of their own, with the text that names
/// them; those that end an answer are not among them.
pub fn lark(text: &str, specials: &[(u32, &str)]) -> Result<String> {
    let calls: Calls = serde_json::from_str(text).map_err(|e| invalid(format!("the tools are not usable: {e}")))?;
    if calls.tools.is_empty() || calls.tools.len() > MAX_TOOLS {
        return Err(invalid(format!("{} tools are given; it must be 1 to {MAX_TOOLS}", calls.tools.len())));
    }
    let mut out = match calls.form {
        Form::Llama3 => llama3(&calls, specials)?,
        Form::Pythonic => pythonic(&calls, specials)?,
        _ => blocks(&calls, specials)?,
    };
    out += &format!("WS: /{}/\n", schema::WHITE_SPACE);
    Ok(out)
}

fn or_answer(calls: &str, answer: &Value) -> Result<String> {
    Ok(format!("start: {calls} | answer\nanswer: %json {}\n", schema::prepare(answer.clone())?))
}

/// Calls that a tag begins.
fn blocks(calls: &Calls, specials: &[(u32, &str)]) -> Result<String> {
    let opening = calls.form.opening();
    let opens = call_forms::tag(opening.text, specials);
    let one = calls.only == Some(Only::One) || !opening.repeats;
    let all = if one { "block" } else { "block (WS? block)*" };
    let mut out = match (&calls.only, &calls.answer) {
        (Some(_), _) => format!("start: {all}\nblock: {opens} body\n"),
        (None, Some(answer)) => or_answer(all, answer)? + &format!("block: {opens} body\n"),
        (None, None) => free(calls.form, &opens, specials),
    };
    out += &call_forms::body(calls, specials)?;
    Ok(out)
}

/// A terminal that begins a call is lazy, so that it ends where the call begins; the free text's terminals exclude that
/// text, so that nothing else could be meant. A token without text may stand between two texts, and what it parts must
/// not be a call to a reader who does not see it.
fn free(form: Form, opens: &str, specials: &[(u32, &str)]) -> String {
    let text = form.opening().text;
    let some: Vec<u32> = specials.iter().filter(|(_, special)| *special != text).map(|(id, _)| *id).collect();
    let others = (!some.is_empty()).then(|| format!("UNCUT? {}", tokens(&some)));
    let tag = escaped(text);
    let mut out = match (form.opening().closes, &others) {
        (true, Some(others)) => format!("start: (call | {others})* REST?\n"),
        (true, None) => "start: call* REST?\n".to_string(),
        // What has no end of its own is the answer's.
        (false, Some(others)) => format!("start: ({others})* (REST? | call (WS? {opens} body)*)\n"),
        (false, None) => format!("start: REST? | call (WS? {opens} body)*\n"),
    };
    if others.is_some() {
        let cut: Vec<String> = text.char_indices().skip(1).map(|(n, _)| escaped(&text[..n])).collect();
        out += &format!("UNCUT: REST & ~/(.|\\n)*({})/\n", cut.join("|"));
    }
    if opens.starts_with('<') {
        out += &format!("call: REST? {opens} body\n"); // a token: nothing else is one
    } else {
        out += &format!("call: open body\nopen[lazy]: /(.|\\n)*{tag}/\n");
    }
    out += &format!("REST: /(.|\\n)+/ & ~/(.|\\n)*{tag}(.|\\n)*/\n");
    out
}

fn llama3(calls: &Calls, specials: &[(u32, &str)]) -> Result<String> {
    let all = "again (WS? \";\" WS? again)*";
    let start = match (&calls.only, &calls.answer) {
        (Some(Only::One), _) => "start: again\n".to_string(),
        (Some(Only::Some), _) => format!("start: {all}\n"),
        (None, Some(answer)) => or_answer(all, answer)?,
        (None, None) => free_llama3(specials),
    };
    Ok(start + LLAMA3_NEXT + &call_forms::arguments(calls)? + &call_forms::named(calls, "parameters"))
}

fn free_llama3(specials: &[(u32, &str)]) -> String {
    const OBJECT: &str = r"[ \n\r\t]*\{[ \n\r\t]*";
    let some: Vec<u32> = specials.iter().map(|(id, _)| *id).collect();
    let mut out = String::new();
    let (before, free) = if some.is_empty() {
        ("tag?".to_string(), "FREE".to_string())
    } else {
        let any = tokens(&some);
        (format!("(tag | {any})*"), format!("FREE | DECIDED {any} ({any} | ANY)*"))
    };
    out += &format!("start: {before} (calls | {free})?\n");
    out += "calls: call (WS? \";\" WS? again)*\n";
    out += "call: open_name after_name \"}\" | open_type typed \"}\"\n";
    out += &format!("open_name[lazy]: /{OBJECT}\"name\"/\nopen_type[lazy]: /{OBJECT}\"type\"/\n");
    let tag = escaped(PYTHON_TAG);
    out += &format!("tag[lazy]: /[ \\n\\r\\t]*{tag}/\n");
    out += "ANY: /(.|\\n)+/\n";
    // A key with an escape could spell any of those.
    out += &format!(
        "FREE: /(.|\\n)+/ & ~/[ \\n\\r\\t]*{tag}(.|\\n)*/ & \
         ~/{OBJECT}\"((name|type|id|parameters|arguments)\"|[^\"\\\\]*\\\\)(.|\\n)*/\n"
    );
    out += "DECIDED: /[ \\n\\r\\t]*[^ \\n\\r\\t{<](.|\\n)*/\n";
    out
}

/// A list of calls as Python writes them, which is the whole answer. Its reader takes an answer for one that begins with
/// a bracket, a name and a parenthesis: a terminal up to there is lazy, and no free text begins so.
fn pythonic(calls: &Calls, specials: &[(u32, &str)]) -> Result<String> {
    const BLANKS: &str = r"[ \n\r\t]*";
    let mut values = Values::new(Syntax::Python, specials);
    let (mut one, mut first, mut rules) = (Vec::new(), Vec::new(), String::new());
    for (i, tool) in calls.tools.iter().enumerate() {
        rules += &format!("args_{i}: {}\n", values.arguments(tool)?);
        one.push(format!("{} args_{i} \")\"", literal(&format!("{}(", tool.name))));
        first.push(format!("open_{i} args_{i} \")\""));
    }
    let more = "(\",\" WS? one)* \"]\"";
    let start = match (&calls.only, &calls.answer) {
        (Some(Only::One), _) => "start: \"[\" one \"]\"\n".to_string(),
        (Some(Only::Some), _) => format!("start: \"[\" one {more}\n"),
        (None, Some(answer)) => or_answer(&format!("\"[\" one {more}"), answer)?,
        (None, None) => {
            for (i, tool) in calls.tools.iter().enumerate() {
                let name = escaped(&tool.name);
                rules += &format!("open_{i}[lazy]: /{BLANKS}\\[{BLANKS}{name}{BLANKS}\\(/\n");
            }
            let some: Vec<u32> = specials.iter().map(|(id, _)| *id).collect();
            let (before, free) = if some.is_empty() {
                (String::new(), "FREE".to_string())
            } else {
                let any = tokens(&some);
                rules += "ANY: /(.|\\n)+/\n";
                rules += &format!(
                    "DECIDED: /{BLANKS}([^ \\n\\r\\t\\[]|\\[{BLANKS}[^ \\n\\r\\tA-Za-z0-9_.\\-])(.|\\n)*/\n"
                );
                (format!("({any})* "), format!("FREE | DECIDED {any} ({any} | ANY)*"))
            };
            rules += &format!("FREE: /(.|\\n)+/ & ~/{BLANKS}\\[{BLANKS}[A-Za-z0-9_.\\-]+{BLANKS}\\((.|\\n)*/\n");
            format!("start: {before}(first {more} | {free})?\nfirst: {}\n", first.join("\n  | "))
        }
    };
    Ok(format!("{start}one: {}\n{rules}{}", one.join("\n  | "), values.rules()))
}

pub fn tokens(ids: &[u32]) -> String {
    let list: Vec<String> = ids.iter().map(u32::to_string).collect();
    format!("<[{}]>", list.join(","))
}

/// `text` as a string of Lark's, which has JSON's escapes and no raw U+007F.
pub fn literal(text: &str) -> String {
    Value::String(text.to_string()).to_string().replace('\u{7f}', "\\u007f")
}

/// `text` inside a regular expression.
pub fn escaped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        if !c.is_alphanumeric() && c.is_ascii_graphic() && !"<>:_=\"".contains(c) {
            out.push('\\');
        }
        out.push(c);
    }
    out
}
