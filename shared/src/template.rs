//! Templates of scope ids: literal text with values in place.
//!
//! Different values never meet in one scope id of a template: `%`, `:` and control characters (Unicode category Cc:
//! C0, DEL and C1, each octet of their UTF-8) of a value are percent-encoded, and between two values stands a `:`.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// Scope ids have at most this many characters.
pub const MAX_SCOPE_ID_CHARACTERS: usize = 255;

/// Literal text with values in place; the values' expressions are kept beside it, in order.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Template {
    /// Literal texts around the values: one more than there are values.
    literals: Vec<String>,
}

/// Why a text is not a template.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError<E> {
    /// The text is empty.
    #[error("the scope template is empty")]
    Empty,
    /// A `{` has no `}`.
    #[error("the scope template has a {{ at character {0} without its }}")]
    Unclosed(usize),
    /// A `}` has no `{`.
    #[error("the scope template has a }} at character {0} without its {{")]
    Unopened(usize),
    /// What stands between braces is no expression.
    #[error("in the scope template, the expression at character {at}: {error}")]
    Expression {
        /// Character, from 1, at which the expression begins.
        at: usize,
        /// What is wrong with it.
        error: E,
    },
    /// Two values could run into each other.
    #[error(
        "the scope template needs a : between the values that end and begin around character {0}, or different values could give one scope id"
    )]
    Ambiguous(usize),
    /// A control character stands in the text.
    #[error("the scope template has a control character at character {0}")]
    ControlCharacter(usize),
    /// No value fits in beside the literal text.
    #[error("the scope template's own text is longer than 255 characters")]
    TooLong,
}

/// Values that give no scope id. Never names them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ScopeIdError {
    /// The values are too long.
    #[error("a scope id is longer than 255 characters")]
    TooLong,
    /// The values are all empty, and there is no text around them.
    #[error("a scope id is empty")]
    Empty,
    /// The number of values is not the template's.
    #[error("a scope template was given a wrong number of values")]
    WrongNumberOfValues,
}

impl Template {
    /// Reads a template; `expression` reads what stands between braces. The first `}` that leaves a readable
    /// expression ends it, so that expressions may hold braces in their own literals.
    ///
    /// # Errors
    /// The text is not a template.
    pub fn parse<T, E>(
        text: &str,
        expression: impl Fn(&str) -> Result<T, E>,
    ) -> Result<(Self, Vec<T>), TemplateError<E>> {
        if text.is_empty() {
            return Err(TemplateError::Empty);
        }
        let character = |offset: usize| text[..offset].chars().count() + 1;
        let mut literals = Vec::new();
        let mut values = Vec::new();
        let mut position = 0;
        loop {
            let rest = &text[position..];
            let end = rest.find(['{', '}']).map_or(text.len(), |found| position + found);
            let literal = &text[position..end];
            if let Some((at, _)) = literal.char_indices().find(|(_, c)| c.is_control()) {
                return Err(TemplateError::ControlCharacter(character(position + at)));
            }
            let inner = !literals.is_empty() && end < text.len();
            if inner && text[end..].starts_with('{') && !literal.contains(':') {
                return Err(TemplateError::Ambiguous(character(position)));
            }
            literals.push(literal.to_owned());
            if end == text.len() {
                break;
            }
            if text[end..].starts_with('}') {
                return Err(TemplateError::Unopened(character(end)));
            }
            let start = end + 1;
            let (value, after) = Self::value(text, start, &expression).map_err(|failure| match failure {
                None => TemplateError::Unclosed(character(end)),
                Some(error) => TemplateError::Expression { at: character(start), error },
            })?;
            values.push(value);
            position = after;
        }
        if literals.iter().map(|literal| literal.chars().count()).sum::<usize>() > MAX_SCOPE_ID_CHARACTERS {
            return Err(TemplateError::TooLong);
        }
        Ok((Self { literals }, values))
    }

    /// The expression that begins at `start` and the offset after its brace.
    fn value<T, E>(
        text: &str,
        start: usize,
        expression: &impl Fn(&str) -> Result<T, E>,
    ) -> Result<(T, usize), Option<E>> {
        let mut first_error = None;
        for (closing, _) in text[start..].match_indices('}') {
            match expression(&text[start..start + closing]) {
                Ok(value) => return Ok((value, start + closing + 1)),
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
        Err(first_error)
    }

    /// How many values the template takes.
    pub fn value_count(&self) -> usize {
        self.literals.len() - 1
    }

    /// The literal texts around the values: one more than there are values.
    pub fn literals(&self) -> &[String] {
        &self.literals
    }

    /// The text before the first value.
    pub fn prefix(&self) -> &str {
        self.literals.first().map_or("", String::as_str)
    }

    /// Whether some values give this scope id. Encoded values hold neither `:` nor control characters, so that what
    /// stands between the literal texts decides; a percent sign is not looked at, which takes no scope id away.
    pub fn can_give(&self, scope_id: &str) -> bool {
        let Some(rest) = scope_id.strip_prefix(self.prefix()) else { return false };
        // Offsets at which the literals so far can end.
        let mut ends = BTreeSet::from([scope_id.len() - rest.len()]);
        for literal in &self.literals[1..] {
            let mut next = BTreeSet::new();
            for end in ends {
                let rest = &scope_id[end..];
                let value = rest.find(|c: char| c == ':' || c.is_control()).unwrap_or(rest.len());
                let lengths = (0..=value).filter(|length| rest.is_char_boundary(*length));
                next.extend(
                    lengths.filter(|length| rest[*length..].starts_with(literal)).map(|l| end + l + literal.len()),
                );
            }
            ends = next;
        }
        ends.contains(&scope_id.len())
    }

    /// The scope id with these values in place; `None` when a value is null, which gives no scope.
    ///
    /// # Errors
    /// The values give no scope id.
    pub fn scope_id(&self, values: &[Option<&str>]) -> Result<Option<String>, ScopeIdError> {
        if values.len() + 1 != self.literals.len() {
            return Err(ScopeIdError::WrongNumberOfValues);
        }
        let mut id = self.prefix().to_owned();
        for (value, literal) in values.iter().zip(&self.literals[1..]) {
            let Some(value) = value else { return Ok(None) };
            encode(value, &mut id);
            id.push_str(literal);
        }
        if id.is_empty() {
            Err(ScopeIdError::Empty)
        } else if id.len() > MAX_SCOPE_ID_CHARACTERS && id.chars().count() > MAX_SCOPE_ID_CHARACTERS {
            Err(ScopeIdError::TooLong)
        } else {
            Ok(Some(id))
        }
    }
}

/// Appends a value, its `%`, `:` and control characters percent-encoded.
fn encode(value: &str, into: &mut String) {
    const HEX: [char; 16] = ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'A', 'B', 'C', 'D', 'E', 'F'];
    for c in value.chars() {
        if c == '%' || c == ':' || c.is_control() {
            for octet in c.encode_utf8(&mut [0; 4]).bytes() {
                into.push('%');
                into.push(HEX[usize::from(octet >> 4)]);
                into.push(HEX[usize::from(octet & 15)]);
            }
        } else {
            into.push(c);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn word(text: &str) -> Result<String, &'static str> {
        if text.is_empty() || text.contains('!') { Err("no word") } else { Ok(text.to_owned()) }
    }

    fn template(text: &str) -> Template {
        Template::parse(text, word).expect(text).0
    }

    #[test]
    fn parses_literals_and_expressions() {
        let (parsed, values) = Template::parse("a:{b}:c{d}", word).expect("a template");
        assert_eq!(values, ["b", "d"]);
        assert_eq!(parsed.literals, ["a:", ":c", ""]);
        let (_, values) = Template::parse("public", word).expect("a constant");
        assert!(values.is_empty());
        // An expression may hold a brace of its own: the first reading that works ends it.
        let quoted =
            |text: &str| if text.matches('\'').count().is_multiple_of(2) { Ok(text.to_owned()) } else { Err(()) };
        let (_, values) = Template::parse("a:{j #>> '{x,y}'}", quoted).expect("a template");
        assert_eq!(values, ["j #>> '{x,y}'"]);
    }

    #[test]
    fn refuses_bad_templates() {
        let refused = |text: &str| Template::parse(text, word).expect_err(text);
        assert_eq!(refused(""), TemplateError::Empty);
        assert_eq!(refused("é:{b"), TemplateError::Unclosed(3));
        assert_eq!(refused("a}"), TemplateError::Unopened(2));
        assert_eq!(refused("a:{}"), TemplateError::Expression { at: 4, error: "no word" });
        assert_eq!(refused("{a}{b}"), TemplateError::Ambiguous(4));
        assert_eq!(refused("{a}-{b}"), TemplateError::Ambiguous(4));
        assert_eq!(refused("a\tb"), TemplateError::ControlCharacter(2));
        assert_eq!(refused(&"x".repeat(256)), TemplateError::TooLong);
    }

    #[test]
    fn encodes_separators_percent_and_control_characters() {
        let id = |value: &str| template("s:{v}").scope_id(&[Some(value)]).expect("short").expect("not null");
        for (value, expected) in [
            ("u_123", "s:u_123"),
            ("", "s:"),
            ("a:b%c", "s:a%3Ab%25c"),
            ("\u{0}\n\u{1f}\u{7f}", "s:%00%0A%1F%7F"),
            ("\u{80}\u{9f}\u{a0}", "s:%C2%80%C2%9F\u{a0}"),
            ("é/ 😀{}", "s:é/ 😀{}"),
        ] {
            assert_eq!(id(value), expected);
        }
    }

    #[test]
    fn a_null_value_gives_no_scope() {
        assert_eq!(template("a:{b}:{c}").scope_id(&[Some("1"), None]), Ok(None));
        assert_eq!(template("a:{b}").scope_id(&[]), Err(ScopeIdError::WrongNumberOfValues));
    }

    #[test]
    fn a_template_gives_the_scope_ids_of_its_own_form_alone() {
        for (text, gives, never) in [
            ("public", &["public"][..], &["", "publi", "public:", "public:1", "xpublic"][..]),
            ("s:{v}", &["s:", "s:1", "s:é%3A"], &["s", "t:1", "s:1:2", "s:a\nb", "xs:1"]),
            ("a:{b}:{c}", &["a::", "a:1:2"], &["a:", "a:1", "a:1:2:3"]),
            ("{b}-x:{c}y", &["-x:y", "1-x-x:yy"], &["1:y", "1-x:", "1-x:2"]),
            ("{v}", &["", "1", "public"], &["s:1"]),
        ] {
            let template = template(text);
            for id in gives {
                assert!(template.can_give(id), "{text} gives {id:?}");
            }
            for id in never {
                assert!(!template.can_give(id), "{text} does not give {id:?}");
            }
        }
    }

    #[test]
    fn scope_ids_are_bounded_in_characters() {
        let one = template("s:{v}");
        assert!(one.scope_id(&[Some(&"é".repeat(253))]).expect("255 characters").is_some());
        assert_eq!(one.scope_id(&[Some(&"é".repeat(254))]), Err(ScopeIdError::TooLong));
        assert_eq!(one.scope_id(&[Some(&":".repeat(85))]), Err(ScopeIdError::TooLong));
        assert_eq!(template("{v}").scope_id(&[Some("")]), Err(ScopeIdError::Empty));
    }

    proptest! {
        #[test]
        fn different_values_never_meet(
            a in proptest::collection::vec("[ab:%\u{0}-\u{3}]{0,4}|3A", 2),
            b in proptest::collection::vec("[ab:%\u{0}-\u{3}]{0,4}|3A", 2),
            shape in prop::sample::select(vec!["{x}:{y}", "p{x}a:b{y}q", "{x}::{y}", "%{x}%3A:{y}a"]),
        ) {
            let of = |values: &[String]| {
                let values: Vec<Option<&str>> = values.iter().map(|value| Some(value.as_str())).collect();
                template(shape).scope_id(&values).expect("short").expect("not null")
            };
            prop_assert_eq!(of(&a) == of(&b), a == b);
            prop_assert!(template(shape).can_give(&of(&a)));
        }
    }
}
