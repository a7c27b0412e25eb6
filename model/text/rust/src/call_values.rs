//! Arguments in a syntax of a family's own, as Lark's rules: Python's keywords and literals, and Gemma's. What these
//! rules do not know of a schema is written as JSON where that can be read, too (Python), else refused.

use std::collections::BTreeMap;

use serde_json::{json, Value};

use crate::border::{invalid, Result};
use crate::call_forms::tag;
use crate::calls::{literal, Tool};
use crate::schema;

#[derive(Clone, Copy, PartialEq)]
pub enum Syntax {
    /// `key=value, ...`, with Python's words and strings in either quotes.
    Python,
    /// `key:value,...`, with strings between marks that nothing escapes.
    Gemma,
}

const MARK: &str = "<|\"|>";
/// Keywords that say nothing of a value.
const NOTES: [&str; 10] = [
    "title", "description", "default", "examples", "$comment", "$schema", "deprecated", "readOnly", "writeOnly", "strict",
];
const DEFS: [&str; 2] = ["$defs", "definitions"];
/// What each type's rule reads of a schema; of numbers all that there is.
const READ: [(&str, &[&str]); 7] = [
    ("string", &["minLength", "maxLength"]),
    ("array", &["items", "minItems", "maxItems"]),
    ("object", &["properties", "required", "additionalProperties"]),
    ("integer", &["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]),
    ("number", &["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]),
    ("boolean", &[]),
    ("null", &[]),
];

pub struct Values<'a> {
    syntax: Syntax,
    /// Gemma's, as the vocabulary has it.
    mark: String,
    tool: Option<&'a Tool>,
    /// Rules of the tool's definitions.
    defined: BTreeMap<String, String>,
    rules: String,
    count: usize,
    any: bool,
}

impl<'a> Values<'a> {
    pub fn new(syntax: Syntax, specials: &[(u32, &str)]) -> Self {
        let mark = tag(MARK, specials);
        Values { syntax, mark, tool: None, defined: BTreeMap::new(), rules: String::new(), count: 0, any: false }
    }

    /// All rules so far.
    pub fn rules(&self) -> String {
        let mut out = self.rules.clone();
        if self.any {
            out += "KEY: /[A-Za-z0-9_.\\-]{1,256}/\n";
            out += &match self.syntax {
                Syntax::Python => format!("any_value: %json {}\nany_pair: KEY \"=\" any_value\n", any_json()),
                Syntax::Gemma => {
                    let number = schema::prepare(json!({"type": "number"})).unwrap_or_default();
                    format!(
                        "any_value: any_text | any_number | \"true\" | \"false\" | \"null\" | any_list | any_object\n\
                         any_number: %json {number}\nany_pair: KEY \":\" any_value\n\
                         any_list: \"[\" (any_value (\",\" any_value)*)? \"]\"\n\
                         any_object: \"{{\" (any_pair (\",\" any_pair)*)? \"}}\"\n"
                    )
                }
            };
        }
        out
    }

    /// What stands between the brackets of a call of `tool`: its parameters in their order, the optional ones or not.
    pub fn arguments(&mut self, tool: &'a Tool) -> Result<String> {
        self.tool = Some(tool);
        self.defined.clear();
        self.pairs(&tool.parameters, if self.syntax == Syntax::Python { "=" } else { ":" })
    }

    fn rule(&mut self, body: &str) -> String {
        self.count += 1;
        let name = format!("own_{}", self.count);
        self.rules += &format!("{name}: {body}\n");
        name
    }

    fn between(&self) -> &'static str {
        if self.syntax == Syntax::Python { "\",\" WS?" } else { "\",\"" }
    }

    fn any_text(&mut self) -> Result<()> {
        if !self.any {
            self.any = true;
            if self.syntax == Syntax::Gemma {
                let text = self.text(&json!({}))?;
                self.rules += &format!("any_text: {text}\n");
            }
        }
        Ok(())
    }

    fn pairs(&mut self, schema: &Value, is: &str) -> Result<String> {
        let between = self.between();
        let Some(listed) = schema.get("properties").and_then(Value::as_object) else {
            if schema.get("additionalProperties") == Some(&Value::Bool(false)) {
                return Ok("\"\"".into());
            }
            self.any_text()?;
            return Ok(format!("(any_pair ({between} any_pair)*)?"));
        };
        let required = schema.get("required").and_then(Value::as_array);
        let (mut first, mut after) = ("\"\"".to_string(), "\"\"".to_string());
        for (key, of) in listed.iter().rev() {
            let pair = format!("{} {}", literal(&format!("{key}{is}")), self.value(of)?);
            let must = required.is_some_and(|list| list.iter().any(|name| name == key));
            let (begins, goes_on) = (format!("{pair} {after}"), format!("{between} {pair} {after}"));
            first = self.rule(&if must { begins } else { format!("{begins} | {first}") });
            after = self.rule(&if must { goes_on } else { format!("{goes_on} | {after}") });
        }
        Ok(first)
    }

    fn value(&mut self, schema: &Value) -> Result<String> {
        let own = json!({});
        let schema = if schema == &Value::Bool(true) { &own } else { schema };
        let Some(object) = schema.as_object() else { return self.other(schema) };
        let said: Vec<&str> =
            object.keys().map(String::as_str).filter(|k| !NOTES.contains(k) && !DEFS.contains(k)).collect();
        let only = |key: &str| said == [key];
        if said.is_empty() {
            self.any_text()?;
            return Ok("any_value".into());
        }
        if only("$ref") {
            return self.reference(schema);
        }
        if let (true, Some(list)) = (only("anyOf"), schema["anyOf"].as_array()) {
            let all: Vec<String> = list.iter().map(|one| self.value(one)).collect::<Result<_>>()?;
            return Ok(format!("({})", all.join(" | ")));
        }
        if said.iter().all(|key| ["type", "enum", "const"].contains(key)) && (said.len() > 1 || !only("type")) {
            let list = match (schema.get("const"), schema.get("enum").and_then(Value::as_array)) {
                (Some(one), _) => vec![one.clone()],
                (None, Some(list)) => list.clone(),
                _ => return self.other(schema),
            };
            let fits = |one: &Value| schema.get("type").is_none() || types(schema).any(|kind| is_of(kind, one));
            let all: Vec<String> = list.iter().filter(|one| fits(one)).map(|one| self.written(one)).collect();
            return if all.is_empty() { self.other(schema) } else { Ok(format!("({})", all.join(" | "))) };
        }
        let known = |key: &&str| *key == "type" || READ.iter().any(|(_, read)| read.contains(key));
        if types(schema).next().is_none() || !said.iter().all(known) {
            return self.other(schema);
        }
        let all: Vec<String> = types(schema).map(|kind| self.of_type(kind, schema)).collect::<Result<_>>()?;
        Ok(format!("({})", all.join(" | ")))
    }

    fn of_type(&mut self, kind: &str, schema: &Value) -> Result<String> {
        let python = self.syntax == Syntax::Python;
        match kind {
            "boolean" => Ok(if python { "(\"True\" | \"False\")" } else { "(\"true\" | \"false\")" }.into()),
            "null" => Ok(if python { "\"None\"" } else { "\"null\"" }.into()),
            "integer" | "number" => self.json(&narrowed(kind, schema)),
            "string" => self.text(&narrowed(kind, schema)),
            "array" => {
                let item = match schema.get("items") {
                    Some(items) => self.value(items)?,
                    None => self.value(&json!({}))?,
                };
                let bound = |key: &str| schema.get(key).and_then(Value::as_u64);
                let (least, most) = (bound("minItems").unwrap_or(0), bound("maxItems"));
                if most == Some(0) {
                    return Ok("\"[]\"".into());
                }
                let more = match (least.saturating_sub(1), most) {
                    (0, None) => "*".to_string(),
                    (least, None) => format!("{{{least},}}"),
                    (least, Some(most)) => format!("{{{least},{}}}", most - 1),
                };
                let all = self.rule(&format!("{item} ({} {item}){more}", self.between()));
                Ok(format!("\"[\" {all}{} \"]\"", if least == 0 { "?" } else { "" }))
            }
            "object" if matches!(schema.get("additionalProperties"), None | Some(Value::Bool(false))) && !python => {
                let pairs = self.pairs(schema, ":")?;
                Ok(format!("\"{{\" {pairs} \"}}\""))
            }
            _ => self.other(&narrowed(kind, schema)),
        }
    }

    fn reference(&mut self, schema: &Value) -> Result<String> {
        let name = schema["$ref"].as_str().unwrap_or_default().to_string();
        if let Some(rule) = self.defined.get(&name) {
            return Ok(rule.clone());
        }
        let found = (self.tool.zip(name.strip_prefix('#'))).and_then(|(tool, path)| tool.parameters.pointer(path));
        let Some(of) = found.cloned() else { return self.other(schema) };
        self.count += 1;
        let rule = format!("own_{}", self.count);
        self.defined.insert(name, rule.clone()); // before what it is, which may name it again
        let body = self.value(&of)?;
        self.rules += &format!("{rule}: {body}\n");
        Ok(rule)
    }

    fn text(&mut self, schema: &Value) -> Result<String> {
        let bound = |key: &str| schema.get(key).and_then(Value::as_u64);
        let (least, most) = (bound("minLength").unwrap_or(0), bound("maxLength"));
        let count = |least: u64| match most {
            None => format!("{{{least},}}"),
            Some(most) => format!("{{{least},{most}}}"),
        };
        self.count += 1;
        let name = format!("OWN_{}", self.count);
        if self.syntax == Syntax::Python {
            let quoted = format!("'([^'\\\\\\x00-\\x1f\\x7f]|\\\\['\\\\nrt\"]){}'", count(least));
            self.rules += &format!("{name}: /{quoted}/\n");
            return Ok(format!("({} | {name})", self.json(schema)?));
        }
        if most == Some(0) {
            return Ok(format!("{} {}", self.mark, self.mark));
        }
        let mark = "<\\|\"\\|>";
        let not_inside = format!("~/(.|\\n)*({mark}|<tool_call\\|>)(.|\\n)*/");
        let inside = format!("/(.|\\n){}/ & {not_inside}", count(least.max(1)));
        if self.mark.starts_with('<') {
            self.rules += &format!("{name}: {inside}\n");
            return Ok(format!("{} {name}{} {}", self.mark, if least == 0 { "?" } else { "" }, self.mark));
        }
        // The mark is text: the terminal, which as all lazy ones has a small name, ends with the first.
        let name = name.to_lowercase() + "_text";
        let end = format!("~/(.|\\n)*{mark}(.|\\n)+/ & ~/(.|\\n)*<tool_call\\|>(.|\\n)*/");
        self.rules += &format!("{name}[lazy]: /(.|\\n){}{mark}/ & {end}\n", count(least));
        Ok(format!("{} {name}", self.mark))
    }

    /// One value, as Lark's.
    fn written(&self, value: &Value) -> String {
        let python = self.syntax == Syntax::Python;
        match value {
            Value::String(text) if python => {
                let plain = !text.contains(|c: char| c == '\'' || c == '\\' || c.is_control());
                let single = if plain { format!(" | {}", literal(&format!("'{text}'"))) } else { String::new() };
                format!("{}{single}", literal(&value.to_string()))
            }
            Value::Bool(is) if python => literal(if *is { "True" } else { "False" }),
            Value::Null if python => literal("None"),
            Value::String(text) if text.is_empty() => format!("{} {}", self.mark, self.mark),
            Value::String(text) => format!("{} {} {}", self.mark, literal(text), self.mark),
            _ => literal(&value.to_string()),
        }
    }

    fn json(&mut self, schema: &Value) -> Result<String> {
        let mut schema = schema.clone();
        let refers = schema.to_string().contains("\"$ref\""); // else definitions, which are said each time, are of no use
        for defs in DEFS.into_iter().filter(|_| refers) {
            let defined = self.tool.and_then(|tool| tool.parameters.get(defs));
            if let (Some(defined), Some(own)) = (defined, schema.as_object_mut()) {
                own.insert(defs.into(), defined.clone());
            }
        }
        let name = self.tool.map_or("", |tool| tool.name.as_str());
        let json = schema::prepare(schema)
            .map_err(|e| invalid(format!("the parameters of tool {name:?}: {}", e.message)))?;
        Ok(self.rule(&format!("%json {json}")))
    }

    fn other(&mut self, schema: &Value) -> Result<String> {
        if self.syntax == Syntax::Python {
            return self.json(schema);
        }
        let name = self.tool.map_or("", |tool| tool.name.as_str());
        Err(invalid(format!("the parameters of tool {name:?} cannot be written as this model writes calls")))
    }
}

fn any_json() -> String {
    schema::prepare(json!({})).unwrap_or_default().to_string()
}

fn types(schema: &Value) -> impl Iterator<Item = &str> {
    let one = schema.get("type").and_then(Value::as_str);
    let list = schema.get("type").and_then(Value::as_array);
    one.into_iter().chain(list.into_iter().flatten().filter_map(Value::as_str))
}

fn is_of(kind: &str, value: &Value) -> bool {
    match kind {
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "array" => value.is_array(),
        _ => value.is_object(),
    }
}

/// Of one type alone, with what is said of that one.
fn narrowed(kind: &str, schema: &Value) -> Value {
    let read = READ.iter().find(|(name, _)| *name == kind).map_or(&[] as &[&str], |(_, read)| read);
    let mut out = json!({"type": kind});
    for (key, of) in schema.as_object().into_iter().flatten().filter(|(key, _)| read.contains(&key.as_str())) {
        out[key] = of.clone();
    }
    out
}
