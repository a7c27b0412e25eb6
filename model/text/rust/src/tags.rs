//! Structural tags: free text, and from where a trigger stands one of its tags, with content of a schema and an end. Both
//! forms that vLLM and SGLang take are read: `structures` with `triggers`, and a `format` made of parts.

use serde::Deserialize;
use serde_json::Value;

use crate::border::{invalid, Result};
use crate::calls::literal;
use crate::schema;

const MAX_PARTS: usize = 1024;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Top {
    #[serde(rename = "type")]
    kind: Option<String>,
    format: Option<Format>,
    structures: Option<Vec<Structure>>,
    triggers: Option<Vec<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Structure {
    begin: String,
    schema: Value,
    end: String,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum Format {
    ConstString {
        value: String,
    },
    JsonSchema {
        json_schema: Value,
    },
    Regex {
        pattern: String,
    },
    AnyText {},
    Sequence {
        elements: Vec<Format>,
    },
    Or {
        elements: Vec<Format>,
    },
    Tag(Tag),
    TriggeredTags {
        triggers: Vec<String>,
        tags: Vec<Tag>,
        #[serde(default)]
        at_least_one: bool,
        #[serde(default)]
        stop_after_first: bool,
    },
    TagsWithSeparator {
        tags: Vec<Tag>,
        separator: String,
        #[serde(default)]
        at_least_one: bool,
        #[serde(default)]
        stop_after_first: bool,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tag {
    /// Where tags are listed their kind is known; some say it all the same.
    #[serde(rename = "type", alias = "format", default)]
    kind: Option<String>,
    begin: String,
    content: Box<Format>,
    end: Ends,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Ends {
    One(String),
    Any(Vec<String>),
}

impl Ends {
    fn texts(&self) -> Vec<&str> {
        match self {
            Ends::One(text) => vec![text],
            Ends::Any(texts) => texts.iter().map(String::as_str).collect(),
        }
    }
}

/// Lark for `text`, a structural tag as JSON.
pub fn lark(text: &str) -> Result<String> {
    let top: Top = serde_json::from_str(text).map_err(|e| invalid(format!("the structural tag is not usable: {e}")))?;
    if top.kind.as_deref().is_some_and(|kind| kind != "structural_tag") {
        return Err(invalid("the structural tag's type must be structural_tag"));
    }
    let format = match (top.format, top.structures, top.triggers) {
        (Some(format), None, None) => format,
        (None, Some(structures), Some(triggers)) => Format::TriggeredTags {
            triggers,
            tags: structures.into_iter().map(tag_of).collect(),
            at_least_one: false,
            stop_after_first: false,
        },
        _ => return Err(invalid("a structural tag has either a format, or structures and triggers")),
    };
    let mut writer = Writer { rules: String::new(), parts: 0 };
    let start = writer.part(&format, true)?;
    Ok(format!("start: {start}\n{}", writer.rules))
}

fn tag_of(s: Structure) -> Tag {
    let content = Box::new(Format::JsonSchema { json_schema: s.schema });
    Tag { kind: None, begin: s.begin, content, end: Ends::One(s.end) }
}

struct Writer {
    rules: String,
    parts: usize,
}

impl Writer {
    fn rule(&mut self, prefix: &str, head: &str, body: &str) -> String {
        let name = format!("{prefix}{}", self.parts);
        self.parts += 1;
        self.rules += &format!("{name}{head}: {body}\n");
        name
    }

    /// What matches `format`. Only a part that comes last may be text without an end.
    fn part(&mut self, format: &Format, last: bool) -> Result<String> {
        if self.parts > MAX_PARTS {
            return Err(invalid(format!("the structural tag has more than {MAX_PARTS} parts")));
        }
        self.parts += 1;
        match format {
            Format::ConstString { value } => text("value of a const_string", value),
            Format::JsonSchema { json_schema } => {
                let schema = schema::prepare(json_schema.clone())?;
                Ok(self.rule("json_", "", &format!("%json {schema}")))
            }
            Format::Regex { pattern } => Ok(self.rule("RX_", "", &format!("/{}/", quoted(pattern)?))),
            Format::AnyText {} if last => Ok(self.rule("ANY_", "", "/(.|\\n)+/") + "?"),
            Format::AnyText {} => Err(endless("any_text", "the content of a tag with an end")),
            Format::Sequence { elements } => {
                let parts = elements.iter().enumerate().map(|(i, e)| self.part(e, last && i + 1 == elements.len()));
                Ok(format!("({})", some("sequence", parts.collect::<Result<Vec<_>>>()?)?.join(" ")))
            }
            Format::Or { elements } => {
                let parts = elements.iter().map(|e| self.part(e, last)).collect::<Result<Vec<_>>>()?;
                Ok(format!("({})", some("or", parts)?.join(" | ")))
            }
            Format::Tag(tag) => self.tag(tag, &tag.begin, last),
            Format::TriggeredTags { triggers, tags, at_least_one, stop_after_first } => {
                if !last {
                    return Err(endless("triggered_tags", "the whole of the format"));
                }
                self.triggered(triggers, tags, *at_least_one, *stop_after_first)
            }
            Format::TagsWithSeparator { tags, separator, at_least_one, stop_after_first } => {
                let one = self.any_of(tags, false)?;
                let separator = text("separator", separator)?;
                let all = if *stop_after_first { one } else { format!("({one} ({separator} {one})*)") };
                Ok(if *at_least_one { all } else { all + "?" })
            }
        }
    }

    fn any_of(&mut self, tags: &[Tag], last: bool) -> Result<String> {
        let all = tags.iter().map(|t| self.tag(t, &t.begin, last)).collect::<Result<Vec<_>>>()?;
        let all = some("list of tags", all)?.join(" | ");
        Ok(self.rule("tags_", "", &all))
    }

    /// A tag of which `begin` is still to come.
    fn tag(&mut self, tag: &Tag, begin: &str, last: bool) -> Result<String> {
        if let Some(kind) = tag.kind.as_deref().filter(|kind| *kind != "tag") {
            return Err(invalid(format!("the structural tag lists a {kind:?} where its type can only be tag")));
        }
        let ends = some("list of ends", tag.end.texts())?;
        let open = ends.iter().all(|end| end.is_empty());
        let begin = if begin.is_empty() { String::new() } else { literal(begin) + " " };
        if let (Format::AnyText {}, false) = (&*tag.content, open) {
            let ends = ends.iter().map(|end| pattern("end", end)).collect::<Result<Vec<_>>>()?.join("|");
            return Ok(begin + &self.rule("until_", "[lazy]", &format!("/(.|\\n)*({ends})/")));
        }
        let content = self.part(&tag.content, last && open)?;
        if open {
            return Ok(begin + &content);
        }
        let ends = ends.iter().map(|end| text("end", end)).collect::<Result<Vec<_>>>()?.join(" | ");
        Ok(format!("{begin}{content} ({ends})"))
    }

    /// A terminal that begins a tag is lazy, so that it ends where its trigger does; the free text that follows the last
    /// tag has none.
    fn triggered(&mut self, triggers: &[String], tags: &[Tag], first: bool, only_one: bool) -> Result<String> {
        let mut left: Vec<&Tag> = tags.iter().collect();
        let mut calls = Vec::new();
        let mut begun = Vec::new();
        for trigger in some("list of triggers", triggers.iter().collect())? {
            let (here, others) = left.into_iter().partition(|tag: &&Tag| tag.begin.starts_with(trigger.as_str()));
            left = others;
            let opened = pattern("trigger", trigger)?;
            let here: Vec<&Tag> = here;
            let bodies = here.iter().map(|t| self.tag(t, &t.begin[trigger.len()..], false));
            let bodies = some(&format!("trigger {trigger:?}: list of its tags"), bodies.collect::<Result<Vec<_>>>()?)?;
            let open = self.rule("open_", "[lazy]", &format!("/(.|\\n)*{opened}/"));
            calls.push(self.rule("call_", "", &format!("{open} ({})", bodies.join(" | "))));
            begun.push(opened);
        }
        if let Some(tag) = left.first() {
            return Err(invalid(format!("the tag that begins with {:?} has none of the triggers", tag.begin)));
        }
        let begun = begun.join("|");
        let rest = self.rule("REST_", "", &format!("/(.|\\n)+/ & ~/(.|\\n)*({begun})(.|\\n)*/"));
        let calls = self.rule("calls_", "", &calls.join(" | "));
        let start = if first { self.any_of(tags, false)? } else { String::new() };
        Ok(match (first, only_one) {
            (true, true) => start,
            (true, false) => format!("{start} {calls}* {rest}?"),
            (false, true) => format!("({calls} | {rest})?"),
            (false, false) => format!("{calls}* {rest}?"),
        })
    }
}

fn some<T>(what: &str, list: Vec<T>) -> Result<Vec<T>> {
    if list.is_empty() {
        return Err(invalid(format!("the structural tag has an empty {what}")));
    }
    Ok(list)
}

fn endless(kind: &str, place: &str) -> crate::border::Error {
    invalid(format!("{kind} has no end of its own: in a structural tag it must come last, or be {place}"))
}

fn text(what: &str, value: &str) -> Result<String> {
    if value.is_empty() {
        return Err(invalid(format!("the structural tag has an empty {what}")));
    }
    Ok(literal(value))
}

/// `value` as itself in a regular expression.
fn pattern(what: &str, value: &str) -> Result<String> {
    text(what, value)?;
    let mut out = String::new();
    for c in value.chars() {
        match c {
            '\n' => out += r"\n",
            '\r' => out += r"\r",
            '\t' => out += r"\t",
            c if ".+*?()|[]{}^$\\/#&-~".contains(c) => {
                out.push('\\');
                out.push(c);
            }
            c => out.push(c),
        }
    }
    Ok(out)
}

/// A client's regular expression as it may stand between slashes.
fn quoted(regex: &str) -> Result<String> {
    text("pattern of a regex", regex)?;
    let mut out = String::new();
    let mut escaped = false;
    for c in regex.chars() {
        match c {
            '\n' => out += if escaped { "n" } else { r"\n" },
            '/' if !escaped => out += r"\/",
            c => out.push(c),
        }
        escaped = c == '\\' && !escaped;
    }
    if escaped {
        return Err(invalid("a pattern of the structural tag ends with a backslash"));
    }
    Ok(out)
}
