//! Names of relations, as they stand in `sync.yaml` and in SQL.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// PostgreSQL truncates longer identifiers, so no relation has one.
pub const MAX_IDENTIFIER_OCTETS: usize = 63;

/// A schema-qualified name of a relation; displays as SQL, quoted where it must be.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct RelationName {
    schema: String,
    name: String,
}

/// Why a text is not a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// A part is missing, or characters stand where none may.
    #[error("not a relation name: write schema.name, quoted as in SQL where needed")]
    Malformed,
    /// There is no schema.
    #[error("the relation name has no schema: write schema.name")]
    Unqualified,
    /// There are more than two parts.
    #[error("the relation name has more parts than schema.name")]
    TooManyParts,
    /// A part is longer than PostgreSQL allows.
    #[error("a part of the relation name is longer than 63 octets")]
    TooLong,
}

impl RelationName {
    /// A name from its two parts, each as it stands in the catalog.
    pub fn new(schema: impl Into<String>, name: impl Into<String>) -> Self {
        Self { schema: schema.into(), name: name.into() }
    }

    /// The schema, as it stands in the catalog.
    pub fn schema(&self) -> &str {
        &self.schema
    }

    /// The relation's own name, as it stands in the catalog.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The name in SQL, both parts quoted.
    pub fn quoted(&self) -> String {
        format!("{}.{}", quote_identifier(&self.schema), quote_identifier(&self.name))
    }
}

/// An identifier in SQL, always quoted.
pub fn quote_identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

impl fmt::Display for RelationName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = |name: &str| if is_plain(name) { name.to_owned() } else { quote_identifier(name) };
        write!(f, "{}.{}", part(&self.schema), part(&self.name))
    }
}

impl FromStr for RelationName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let mut parts = Vec::new();
        let mut rest = text;
        loop {
            let (part, after) = identifier(rest)?;
            if part.len() > MAX_IDENTIFIER_OCTETS {
                return Err(NameError::TooLong);
            }
            parts.push(part);
            match after.strip_prefix('.') {
                Some(next) => rest = next,
                None if after.is_empty() => break,
                None => return Err(NameError::Malformed),
            }
        }
        match <[String; 2]>::try_from(parts) {
            Ok([schema, name]) => Ok(Self { schema, name }),
            Err(parts) if parts.len() < 2 => Err(NameError::Unqualified),
            Err(_) => Err(NameError::TooManyParts),
        }
    }
}

/// The identifier at the start of `text`, folded as PostgreSQL folds it, and what follows.
fn identifier(text: &str) -> Result<(String, &str), NameError> {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find(|c| !is_word(c)).unwrap_or(text.len());
        let (word, rest) = text.split_at(end);
        if !word.starts_with(|c: char| is_word(c) && !c.is_ascii_digit() && c != '$') {
            return Err(NameError::Malformed);
        }
        return Ok((word.to_ascii_lowercase(), rest));
    };
    let mut name = String::new();
    let mut rest = quoted;
    loop {
        let (before, after) = rest.split_once('"').ok_or(NameError::Malformed)?;
        name.push_str(before);
        match after.strip_prefix('"') {
            Some(next) => {
                name.push('"');
                rest = next;
            }
            None if name.is_empty() || name.contains('\0') => return Err(NameError::Malformed),
            None => return Ok((name, after)),
        }
    }
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == '$' || !c.is_ascii()
}

/// Reads back as itself without quotes.
fn is_plain(name: &str) -> bool {
    matches!(identifier(name), Ok((read, "")) if read == name) && !name.starts_with('"')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_names_as_sql_does() {
        for (text, schema, name) in [
            ("public.documents", "public", "documents"),
            ("Public.Documents", "public", "documents"),
            (r#""My Schema"."T""#, "My Schema", "T"),
            (r#"a."b.c""#, "a", "b.c"),
            (r#"a."say ""hi""""#, "a", r#"say "hi""#),
            ("_a$1.é", "_a$1", "é"),
        ] {
            let parsed: RelationName = text.parse().expect(text);
            assert_eq!((parsed.schema(), parsed.name()), (schema, name), "{text}");
            assert_eq!(parsed.to_string().parse(), Ok(parsed.clone()), "{text}");
            assert_eq!(parsed.quoted().parse(), Ok(parsed), "{text}");
        }
    }

    #[test]
    fn refuses_what_is_not_a_name() {
        for (text, error) in [
            ("documents", NameError::Unqualified),
            ("", NameError::Malformed),
            ("a.", NameError::Malformed),
            (".b", NameError::Malformed),
            ("a.b.c", NameError::TooManyParts),
            ("a b.c", NameError::Malformed),
            ("1a.b", NameError::Malformed),
            (r#"a."b"#, NameError::Malformed),
            (r#"a."""#, NameError::Malformed),
            (r#"a."b"c"#, NameError::Malformed),
        ] {
            assert_eq!(text.parse::<RelationName>(), Err(error), "{text}");
        }
        assert_eq!(format!("a.{}", "x".repeat(64)).parse::<RelationName>(), Err(NameError::TooLong));
        assert!(format!("a.{}", "x".repeat(63)).parse::<RelationName>().is_ok());
    }
}
