//! The grammar of answers that may call tools: free text stays free, and from where a call begins its name is one of
//! the tools' and its arguments obey that tool's schema. Which text begins a call is what `tool_parser.cc` takes for one.

use serde::Deserialize;
use serde_json::Value;

use crate::border::{invalid, Result};
use crate::schema;

const MAX_TOOLS: usize = 1024;
const PYTHON_TAG: &str = "<|python_tag|>";
const BEGINS_HERMES: &str = "<tool_call>";
const HERMES_CALL: &str = r#"call: open WS? "{" WS? any_order "}" WS? "</tool_call>"
"#;
const LLAMA3_NEXT: &str = r#"again: "{" WS? named "}" | "{" WS? "\"type\"" typed "}"
typed: WS? ":" WS? "\"function\"" WS? "," WS? named
"#;

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Form {
    /// `<tool_call>{...}</tool_call>` anywhere in the text, any number of them.
    Hermes,
    /// The whole answer is an object, or several with ';' between.
    Llama3,
}

/// Nothing but calls: those that were asked for.
#[derive(Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Only {
    One,
    Some,
}

#[derive(Deserialize)]
struct Tool {
    name: String,
    parameters: Value,
}

#[derive(Deserialize)]
struct Calls {
    form: Form,
    tools: Vec<Tool>,
    only: Option<Only>,
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
    let mut out = match (&calls.form, &calls.answer) {
        _ if calls.only.is_some() => only(&calls),
        (Form::Hermes, None) => hermes(specials),
        (Form::Llama3, None) => llama3(specials),
        (Form::Hermes, Some(answer)) => {
            or_answer("call (WS? call)*", answer)? + "open: \"<tool_call>\"\n" + HERMES_CALL
        }
        (Form::Llama3, Some(answer)) => or_answer("again (WS? \";\" WS? again)*", answer)? + LLAMA3_NEXT,
    };
    out += &objects(&calls)?;
    out += &format!("WS: /{}/\n", schema::WHITE_SPACE);
    Ok(out)
}

fn only(calls: &Calls) -> String {
    let one = calls.only == Some(Only::One);
    match calls.form {
        Form::Hermes => {
            let start = if one { "call" } else { "call (WS? call)*" };
            format!("start: {start}\ncall: \"<tool_call>\" WS? \"{{\" WS? named \"}}\" WS? \"</tool_call>\"\n")
        }
        Form::Llama3 => {
            let start = if one { "again" } else { "again (WS? \";\" WS? again)*" };
            format!("start: {start}\n{LLAMA3_NEXT}")
        }
    }
}

fn or_answer(calls: &str, answer: &Value) -> Result<String> {
    Ok(format!("start: {calls} | answer\nanswer: %json {}\n", schema::prepare(answer.clone())?))
}

/// What stands inside an object's braces: `named` when the name comes first, `any_order` also when the arguments do, and
/// `typed` after "type".
fn objects(calls: &Calls) -> Result<String> {
    let key = if matches!(calls.form, Form::Llama3) { "parameters" } else { "arguments" };
    let mut out = String::new();
    let (mut named, mut after_name, mut arguments_first) = (Vec::new(), Vec::new(), Vec::new());
    for (i, tool) in calls.tools.iter().enumerate() {
        let name = literal(&Value::String(tool.name.clone()).to_string());
        let colon = "WS? \":\" WS?";
        let arguments = format!("{} {colon} args_{i} WS?", literal(&format!("\"{key}\"")));
        let arguments_schema = schema::prepare(tool.parameters.clone())
            .map_err(|e| invalid(format!("the parameters of tool {i} ({:?}): {}", tool.name, e.message)))?;
        out += &format!("args_{i}: %json {arguments_schema}\n");
        after_name.push(format!("{colon} {name} WS? \",\" WS? {arguments}"));
        arguments_first.push(format!("{arguments} \",\" WS? \"\\\"name\\\"\" {colon} {name} WS?"));
    }
    named.push("\"\\\"name\\\"\" after_name".to_string());
    let mut rule = |name: &str, options: &[String]| out += &format!("{name}: {}\n", options.join("\n  | "));
    rule("named", &named);
    rule("after_name", &after_name);
    if matches!(calls.form, Form::Hermes) && calls.only.is_none() {
        rule("any_order", &[&["named".to_string()], arguments_first.as_slice()].concat());
    }
    Ok(out)
}

/// A terminal that begins a call is lazy, so that it ends where the call begins; the free text's terminals exclude that
/// text, so that nothing else could be meant. A token without text may stand between two texts, and what it parts must
/// not be a call to a reader who does not see it.
fn hermes(specials: &[(u32, &str)]) -> String {
    let some: Vec<u32> = specials.iter().filter(|(_, text)| *text != BEGINS_HERMES).map(|(id, _)| *id).collect();
    let cut: Vec<&str> = (1..BEGINS_HERMES.len()).map(|n| &BEGINS_HERMES[..n]).collect();
    let mut out = String::new();
    out += &if some.is_empty() {
        "start: call* REST?\n".to_string()
    } else {
        format!("start: (call | UNCUT? {})* REST?\nUNCUT: REST & ~/(.|\\n)*({})/\n", tokens(&some), cut.join("|"))
    };
    out += HERMES_CALL;
    out += &format!("open[lazy]: /(.|\\n)*{BEGINS_HERMES}/\n");
    out += &format!("REST: /(.|\\n)+/ & ~/(.|\\n)*{BEGINS_HERMES}(.|\\n)*/\n");
    out
}

fn llama3(specials: &[(u32, &str)]) -> String {
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
    out += LLAMA3_NEXT;
    out += &format!("open_name[lazy]: /{OBJECT}\"name\"/\nopen_type[lazy]: /{OBJECT}\"type\"/\n");
    let tag = PYTHON_TAG.replace('|', r"\|");
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

fn tokens(ids: &[u32]) -> String {
    let list: Vec<String> = ids.iter().map(u32::to_string).collect();
    format!("<[{}]>", list.join(","))
}

/// `text` as a string of Lark's, which has JSON's escapes and no raw U+007F.
pub fn literal(text: &str) -> String {
    Value::String(text.to_string()).to_string().replace('\u{7f}', "\\u007f")
}
