//! As much of OpenAPI 3.1 as `openapi.json` uses, and nothing that it does not: an unknown keyword is an error, so that
//! none is passed over.

use anyhow::{Context as _, bail, ensure};
use serde_json::{Map, Value};

/// A parsed description.
pub struct Description(Value);

impl Description {
    pub fn parse(octets: &[u8]) -> anyhow::Result<Self> {
        let document: Value = serde_json::from_slice(octets)?;
        ensure!(document["openapi"].as_str().is_some_and(|version| version.starts_with("3.1")), "OpenAPI 3.1");
        Ok(Self(document))
    }

    /// Whether a request's body is described.
    pub fn request(&self, path: &str, body: &Value) -> anyhow::Result<()> {
        let content = &self.operation(path)?["requestBody"]["content"]["application/json"]["schema"];
        self.check(content, body, &format!("{path} request"))
    }

    /// Whether a response's body is described for its status.
    pub fn response(&self, path: &str, status: u16, body: &Value) -> anyhow::Result<()> {
        let responses = &self.operation(path)?["responses"];
        let response =
            responses.get(status.to_string()).with_context(|| format!("{path}: {status} is not described"))?;
        let response = self.resolved(response)?;
        self.check(&response["content"]["application/json"]["schema"], body, &format!("{path} {status}"))
    }

    fn operation(&self, path: &str) -> anyhow::Result<&Value> {
        self.0["paths"][path].get("post").with_context(|| format!("{path} is not described"))
    }

    fn resolved<'a>(&'a self, value: &'a Value) -> anyhow::Result<&'a Value> {
        match value.get("$ref").and_then(Value::as_str) {
            Some(reference) => {
                let pointer = reference.strip_prefix('#').context("a reference inside the document")?;
                self.0.pointer(pointer).with_context(|| format!("{reference} points nowhere"))
            }
            None => Ok(value),
        }
    }

    fn check(&self, schema: &Value, value: &Value, place: &str) -> anyhow::Result<()> {
        let keywords = schema.as_object().with_context(|| format!("{place}: no schema"))?;
        for (keyword, argument) in keywords {
            self.keyword(keywords, keyword, argument, value, place)?;
        }
        Ok(())
    }

    fn keyword(
        &self,
        all: &Map<String, Value>,
        keyword: &str,
        argument: &Value,
        value: &Value,
        place: &str,
    ) -> anyhow::Result<()> {
        let bound = || argument.as_u64().with_context(|| format!("{place}: {keyword}"));
        let fails = |wrong: bool| {
            ensure!(!wrong, "{place}: {keyword} {argument}, not {value}");
            Ok(())
        };
        match keyword {
            "description" | "title" | "examples" => Ok(()),
            "$ref" => {
                let schema = self.resolved(&Value::Object(all.clone()))?.clone();
                self.check(&schema, value, place)
            }
            "type" => {
                let allowed = match argument {
                    Value::Array(types) => types.iter().any(|name| is_of(value, name.as_str().unwrap_or_default())),
                    name => is_of(value, name.as_str().unwrap_or_default()),
                };
                fails(!allowed)
            }
            "const" => fails(value != argument),
            "enum" => fails(!argument.as_array().context("enum")?.contains(value)),
            "oneOf" => {
                let schemas = argument.as_array().context("oneOf")?;
                let results: Vec<_> = schemas.iter().map(|schema| self.check(schema, value, place)).collect();
                let matching = results.iter().filter(|result| result.is_ok()).count();
                let reasons: Vec<_> =
                    results.iter().filter_map(|r| r.as_ref().err().map(ToString::to_string)).collect();
                ensure!(matching == 1, "{place}: {matching} of oneOf match: {reasons:?}");
                Ok(())
            }
            "required" => {
                let names = argument.as_array().context("required")?;
                let missing =
                    names.iter().filter_map(Value::as_str).find(|name| value.is_object() && value.get(name).is_none());
                ensure!(missing.is_none(), "{place}: no {missing:?}");
                Ok(())
            }
            "properties" => {
                for (name, schema) in argument.as_object().context("properties")? {
                    if let Some(member) = value.get(name) {
                        self.check(schema, member, &format!("{place}.{name}"))?;
                    }
                }
                Ok(())
            }
            "additionalProperties" => {
                let known = all.get("properties").and_then(Value::as_object);
                for (name, member) in value.as_object().into_iter().flatten() {
                    if known.is_some_and(|known| known.contains_key(name)) {
                        continue;
                    }
                    match argument {
                        Value::Bool(true) => {}
                        Value::Bool(false) => bail!("{place}: {name} is not described"),
                        schema => self.check(schema, member, &format!("{place}.{name}"))?,
                    }
                }
                Ok(())
            }
            "propertyNames" => {
                for name in value.as_object().into_iter().flat_map(Map::keys) {
                    self.check(argument, &Value::String(name.clone()), &format!("{place}, a name"))?;
                }
                Ok(())
            }
            "dependentRequired" => {
                for (name, needs) in argument.as_object().context("dependentRequired")? {
                    for need in needs.as_array().context("dependentRequired")?.iter().filter_map(Value::as_str) {
                        ensure!(
                            value.get(name).is_none() || value.get(need).is_some(),
                            "{place}: {name} without {need}"
                        );
                    }
                }
                Ok(())
            }
            "items" => {
                for (index, item) in value.as_array().into_iter().flatten().enumerate() {
                    self.check(argument, item, &format!("{place}[{index}]"))?;
                }
                Ok(())
            }
            "minLength" => {
                fails(value.as_str().is_some_and(|text| (text.chars().count() as u64) < bound().unwrap_or(0)))
            }
            "maxLength" => fails(value.as_str().is_some_and(|text| text.chars().count() as u64 > bound().unwrap_or(0))),
            "minProperties" => fails(value.as_object().is_some_and(|map| (map.len() as u64) < bound().unwrap_or(0))),
            "maxProperties" => fails(value.as_object().is_some_and(|map| map.len() as u64 > bound().unwrap_or(0))),
            "minimum" => fails(value.as_f64().is_some_and(|number| number < argument.as_f64().unwrap_or(0.0))),
            "maximum" => fails(value.as_f64().is_some_and(|number| number > argument.as_f64().unwrap_or(0.0))),
            "pattern" => {
                fails(value.as_str().is_some_and(|text| !matches(argument.as_str().unwrap_or_default(), text)))
            }
            "format" => match argument.as_str() {
                Some("uuid") => fails(value.as_str().is_some_and(|text| uuid::Uuid::try_parse(text).is_err())),
                Some("date-time") => {
                    fails(value.as_str().is_some_and(|text| !(text.contains('T') && text.ends_with('Z'))))
                }
                _ => bail!("{place}: the format {argument} is unknown here"),
            },
            _ => bail!("{place}: the keyword {keyword} is unknown here"),
        }
    }
}

fn is_of(value: &Value, name: &str) -> bool {
    match name {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => false,
    }
}

/// The two kinds of pattern there are: groups of lowercase hexadecimal digits between hyphens.
fn matches(pattern: &str, text: &str) -> bool {
    let inner = pattern.strip_prefix('^').and_then(|rest| rest.strip_suffix('$')).expect("an anchored pattern");
    let lengths: Vec<usize> = inner
        .split("[0-9a-f]{")
        .skip(1)
        .map(|part| part.split_once('}').and_then(|(length, _)| length.parse().ok()).expect("a pattern of hex groups"))
        .collect();
    let rebuilt = lengths.iter().map(|length| format!("[0-9a-f]{{{length}}}")).collect::<Vec<_>>().join("-");
    assert_eq!(rebuilt, inner, "a pattern of hex groups");
    let groups: Vec<&str> = text.split('-').collect();
    groups.len() == lengths.len()
        && groups.iter().zip(lengths).all(|(group, length)| {
            group.len() == length && group.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
        })
}
