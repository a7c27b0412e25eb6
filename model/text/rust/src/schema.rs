//! A client's JSON schema as the grammar library is to read it: checked for width, with our white space, and narrowed
//! where the library would let something through that validators refuse.

use serde_json::{json, Map, Value};

use crate::border::{invalid, Result};

const MAX_PROPERTIES: usize = 1000;

/// Between two JSON tokens a model may put one space or one line break with its indent, and not babble
/// blanks for ever.
pub const WHITE_SPACE: &str = r"[ ]|\r?\n[ \t]{0,32}";

/// Keywords whose value is a schema, a list of them, or schemas by name. Everything else is data.
const ONE: [&str; 3] = ["items", "additionalItems", "additionalProperties"];
const LIST: [&str; 5] = ["allOf", "anyOf", "oneOf", "prefixItems", "items"];
const NAMED: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];

pub fn prepare(schema: Value) -> Result<Value> {
    let mut schema = match schema {
        Value::Object(_) => schema,
        Value::Bool(true) => json!({}),
        _ => return Err(invalid("the JSON schema must be an object")),
    };
    check_width(&schema)?;
    narrow(&mut schema, false);
    // Among others the library's own switches, which are not the client's to set.
    schema["x-guidance"] = json!({"whitespace_flexible": true, "whitespace_pattern": WHITE_SPACE});
    Ok(schema)
}

/// Compiling an object costs the square of its properties, and a reference may lead anywhere.
fn check_width(schema: &Value) -> Result<()> {
    match schema {
        Value::Array(items) => items.iter().try_for_each(check_width),
        Value::Object(items) => {
            if let Some(properties) = items.get("properties").and_then(Value::as_object) {
                if properties.len() > MAX_PROPERTIES {
                    return Err(invalid(format!(
                        "the JSON schema has an object of {} properties; at most {MAX_PROPERTIES}",
                        properties.len()
                    )));
                }
            }
            items.values().try_for_each(check_width)
        }
        _ => Ok(()),
    }
}

/// `joined`: inside allOf, where bounds may meet those of another schema.
fn narrow(schema: &mut Value, joined: bool) {
    let Some(object) = schema.as_object_mut() else { return };
    narrow_bounds(object, joined);
    narrow_dates(object);
    for (key, value) in object.iter_mut() {
        let key = key.as_str();
        match value {
            Value::Array(list) if LIST.contains(&key) => list.iter_mut().for_each(|s| narrow(s, joined || key == "allOf")),
            Value::Object(named) if NAMED.contains(&key) => named.values_mut().for_each(|s| narrow(s, false)),
            Value::Object(_) if ONE.contains(&key) => narrow(value, false),
            _ => {}
        }
    }
}

/// The library lets a number be the whole number it must exceed when both bounds have the same integer part: 0 for
/// more than 0 and at most 0.75. The nearest billionth is the bound then, and where the bound has a fraction:
/// -374.8750000000000002 is less than -374.875, but not to readers that keep numbers in 64 bits.
fn narrow_bounds(object: &mut Map<String, Value>, joined: bool) {
    if object.get("type").is_some_and(|t| t == "integer") {
        return;
    }
    for (side, low, own, others) in [
        (1.0, true, "exclusiveMinimum", ["maximum", "exclusiveMaximum"]),
        (-1.0, false, "exclusiveMaximum", ["minimum", "exclusiveMinimum"]),
    ] {
        let Some(bound) = object.get(own).and_then(Value::as_f64) else { continue };
        let near = |other: f64| side * (other - bound) < 1.0;
        let meets = others.iter().filter_map(|o| object.get(*o)?.as_f64()).any(near);
        if bound.fract() == 0.0 && (side * bound < 0.0 || !(meets || joined)) {
            continue;
        }
        let inside = bound + side * f64::max(1e-9, bound.abs() * 2.0 * f64::EPSILON);
        let inclusive = if low { "minimum" } else { "maximum" };
        object.remove(own);
        let tighter = match object.get(inclusive).and_then(Value::as_f64) {
            Some(given) if low => given.max(inside),
            Some(given) => given.min(inside),
            None => inside,
        };
        object.insert(inclusive.into(), json!(tighter));
    }
}

/// The library's dates have a 29th of February every year and a second 60 in every minute, and fractions without end.
fn narrow_dates(object: &mut Map<String, Value>) {
    const DATE: &str = "(?:(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})-(?:(?:0[13-9]|1[0-2])-[0-9]{2}|02-(?:[01][0-9]|2[0-8]))|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)";
    const TIME: &str = r"[0-9]{2}:[0-9]{2}:[0-5][0-9](?:\.[0-9]{1,9})?[^0-9.].*";
    let pattern = match object.get("format").and_then(Value::as_str) {
        Some("date") => format!("^{DATE}$"),
        Some("time") => format!("^{TIME}$"),
        Some("date-time") => format!("^{DATE}[tT]{TIME}$"),
        _ => return,
    };
    if !object.contains_key("pattern") {
        object.insert("pattern".into(), pattern.into());
    } else if let Some(all) = object.entry("allOf").or_insert_with(|| json!([])).as_array_mut() {
        all.push(json!({ "pattern": pattern }));
    }
}
