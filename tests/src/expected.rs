//! What `SELECT` says a scope holds, in the portable JSON of contract.md section 1.
//!
//! PostgreSQL formats the values here, by functions that the product does not use, so that the comparison with a
//! client's copy is one of two independent formatters.

use std::collections::BTreeMap;

use anyhow::Context as _;

use crate::canonical::{Field, Manifest};
use crate::client::{Client, key_text};
use crate::database::Database;
use crate::json::{Json, es6_number};

/// The rows of `from` (a relation, or more of a FROM clause with its WHERE) as a client must hold them, by key.
///
/// # Errors
/// The manifest has no such table, or the query fails.
pub fn rows(source: &Database, manifest: &Manifest, table: &str, from: &str) -> anyhow::Result<BTreeMap<String, Json>> {
    let spec = manifest.table(table)?;
    let columns: Vec<_> = spec.fields.values().map(column).collect();
    let mut rows = BTreeMap::new();
    for values in source.texts(&format!("select {} from {from}", columns.join(", ")))? {
        let mut row = BTreeMap::new();
        for ((id, field), value) in spec.fields.iter().zip(values) {
            row.insert(id.clone(), value.map_or(Ok(Json::Null), |text| portable(field, text))?);
        }
        let key = row.get(&spec.primary_key).map(key_text).context("a row without its key")?;
        rows.insert(key, Json::Object(row));
    }
    Ok(rows)
}

/// Whether a client's copy of one table in one scope is exactly what `SELECT` gives; else the first difference.
///
/// # Errors
/// The copy differs, or the query fails.
pub fn compare(client: &Client, source: &Database, scope: &str, table: &str, from: &str) -> anyhow::Result<usize> {
    let expected = rows(source, client.manifest()?, table, from)?;
    let held = client.contents(scope, table);
    if expected == held {
        return Ok(held.len());
    }
    let missing = expected.keys().filter(|key| !held.contains_key(*key)).count();
    let surplus = held.keys().filter(|key| !expected.contains_key(*key)).count();
    let changed = expected.iter().find(|(key, row)| held.get(*key).is_some_and(|other| other != *row));
    anyhow::bail!(
        "{table} in {scope}: {} rows expected, {} held, {missing} missing, {surplus} surplus, first changed: {:?}",
        expected.len(),
        held.len(),
        changed.map(|(key, row)| (row, held.get(key))),
    )
}

/// An expression for the text of a column.
fn column(field: &Field) -> String {
    let name = format!("\"{}\"", field.name.replace('"', "\"\""));
    match field.portable_type.as_str() {
        "decimal" => format!("trim_scale({name})::text"),
        "boolean" => format!("case when {name} then 'true' else 'false' end || left({name}::text, 0)"),
        "datetime" => format!("to_char({name}, 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')"),
        "date" => format!("to_char({name}, 'YYYY-MM-DD')"),
        "time" => format!("to_char({name}::interval, 'HH24:MI:SS.US')"),
        "bytes" => format!("rtrim(translate(encode({name}, 'base64'), E'+/\\n', '-_'), '=')"),
        // format() uses the type's output function; a cast to text would trim char(n).
        "string" => format!("case when {name} is not null then format('%s', {name}) end"),
        // Of a float the shortest text, also of a real: 0.1 and not the binary64 nearest to its binary32.
        _ => format!("{name}::text"),
    }
}

fn portable(field: &Field, text: String) -> anyhow::Result<Json> {
    Ok(match field.portable_type.as_str() {
        "boolean" => Json::Bool(text == "true"),
        "int" => Json::Number(text),
        "float" => Json::Number(es6_number(text.parse()?).context("a float that is not finite")?),
        "json" => Json::Text(Json::parse(text.as_bytes())?.canonical()?),
        _ => Json::Text(text),
    })
}
