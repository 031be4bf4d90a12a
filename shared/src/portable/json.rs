//! The canonical text of a JSON value (RFC 8785), from any JSON text.
//!
//! A parser of our own, because the canonical form hangs on what general parsers drop: whether a number was written as
//! an integer, duplicate names, and the exact digits. Deliberately absent: recursion, so that nesting costs no stack.

use std::borrow::Cow;

use super::ValueError;
use super::number::es6;

/// The greatest integer that every reader of JSON numbers agrees on.
pub const MAX_SAFE_INTEGER: i64 = (1 << 53) - 1;
/// PostgreSQL's own parser stops at about 6,000 levels under its default `max_stack_depth`.
const MAX_DEPTH: usize = 10_000;

/// Appends `text` as a JSON string, in the one spelling of RFC 8785.
pub fn write_string(text: &str, out: &mut String) {
    out.push('"');
    let mut plain = 0;
    for (at, octet) in text.bytes().enumerate() {
        if octet >= 0x20 && octet != b'"' && octet != b'\\' {
            continue;
        }
        out.push_str(&text[plain..at]);
        plain = at + 1;
        match octet {
            b'"' => out.push_str("\\\""),
            b'\\' => out.push_str("\\\\"),
            0x08 => out.push_str("\\b"),
            0x09 => out.push_str("\\t"),
            0x0A => out.push_str("\\n"),
            0x0C => out.push_str("\\f"),
            0x0D => out.push_str("\\r"),
            _ => {
                const HEX: [char; 16] =
                    ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'a', 'b', 'c', 'd', 'e', 'f'];
                out.push_str("\\u00");
                out.push(HEX[usize::from(octet >> 4)]);
                out.push(HEX[usize::from(octet & 15)]);
            }
        }
    }
    out.push_str(&text[plain..]);
    out.push('"');
}

/// The content of a JSON string token, quotes included in `token`.
pub(super) fn read_string(token: &str) -> Result<Cow<'_, str>, ValueError> {
    let content = token.strip_prefix('"').and_then(|t| t.strip_suffix('"')).ok_or(ValueError::JsonSyntax)?;
    if content.bytes().all(|b| b >= 0x20 && b != b'"' && b != b'\\') {
        return Ok(Cow::Borrowed(content));
    }
    // Refuses control characters, unknown escapes and surrogates without their pair.
    serde_json::from_str::<String>(token).map(Cow::Owned).map_err(|_| ValueError::JsonSyntax)
}

/// The RFC 8785 text of the one JSON value that `text` holds.
///
/// # Errors
/// `text` is not JSON, or holds what has no faithful canonical form: duplicate names, an integer beyond ±(2^53−1), a
/// number beyond binary64, half a surrogate pair.
pub fn canonical_json(text: &str) -> Result<String, ValueError> {
    let mut writer = Writer { text, at: 0, out: String::with_capacity(text.len()), open: Vec::new() };
    writer.run()?;
    Ok(writer.out)
}

/// An array or object whose end has not been read.
enum Open<'a> {
    Array,
    Object {
        /// Octet of the output after the opening brace.
        start: usize,
        members: Vec<Member<'a>>,
        /// Whether names have ascended so far.
        sorted: bool,
    },
}

struct Member<'a> {
    name: Cow<'a, str>,
    /// Octet of the output at which the member begins.
    start: usize,
}

struct Writer<'a> {
    text: &'a str,
    at: usize,
    out: String,
    open: Vec<Open<'a>>,
}

/// What follows a value.
enum After {
    Value,
    End,
}

impl<'a> Writer<'a> {
    fn run(&mut self) -> Result<(), ValueError> {
        loop {
            if self.value()? {
                continue;
            }
            if let After::End = self.after()? {
                break;
            }
        }
        if self.at == self.text.len() { Ok(()) } else { Err(ValueError::JsonSyntax) }
    }

    fn peek(&mut self) -> Option<u8> {
        let rest = self.text.as_bytes().get(self.at..)?;
        self.at += rest.iter().take_while(|b| matches!(b, b' ' | b'\t' | b'\n' | b'\r')).count();
        self.text.as_bytes().get(self.at).copied()
    }

    fn expect(&mut self, octet: u8) -> Result<(), ValueError> {
        if self.peek() == Some(octet) {
            self.at += 1;
            Ok(())
        } else {
            Err(ValueError::JsonSyntax)
        }
    }

    /// Writes a scalar or an empty container (`false`), or opens a container before its first value (`true`).
    fn value(&mut self) -> Result<bool, ValueError> {
        match self.peek().ok_or(ValueError::JsonSyntax)? {
            b'{' => {
                self.at += 1;
                if self.peek() == Some(b'}') {
                    self.at += 1;
                    self.out.push_str("{}");
                    return Ok(false);
                }
                self.out.push('{');
                let start = self.out.len();
                self.push(Open::Object { start, members: Vec::new(), sorted: true })?;
                self.name()?;
                return Ok(true);
            }
            b'[' => {
                self.at += 1;
                if self.peek() == Some(b']') {
                    self.at += 1;
                    self.out.push_str("[]");
                    return Ok(false);
                }
                self.out.push('[');
                self.push(Open::Array)?;
                return Ok(true);
            }
            b'"' => {
                let content = read_string(self.string_token()?)?;
                write_string(&content, &mut self.out);
            }
            b't' => self.literal("true")?,
            b'f' => self.literal("false")?,
            b'n' => self.literal("null")?,
            _ => self.number()?,
        }
        Ok(false)
    }

    fn push(&mut self, open: Open<'a>) -> Result<(), ValueError> {
        if self.open.len() == MAX_DEPTH {
            return Err(ValueError::JsonDepth);
        }
        self.open.push(open);
        Ok(())
    }

    /// Reads the comma before the next value, or closes containers until there is one.
    fn after(&mut self) -> Result<After, ValueError> {
        loop {
            let Some(innermost) = self.open.last() else {
                self.peek();
                return Ok(After::End);
            };
            let (is_object, close) = match innermost {
                Open::Array => (false, b']'),
                Open::Object { .. } => (true, b'}'),
            };
            if self.peek() == Some(b',') {
                self.at += 1;
                self.out.push(',');
                if is_object {
                    self.name()?;
                }
                return Ok(After::Value);
            }
            self.expect(close)?;
            if let Some(Open::Object { start, members, sorted: false }) = self.open.pop() {
                sort_members(&mut self.out, start, members)?;
            }
            self.out.push(char::from(close));
        }
    }

    /// Reads and writes a member's name and colon.
    fn name(&mut self) -> Result<(), ValueError> {
        if self.peek() != Some(b'"') {
            return Err(ValueError::JsonSyntax);
        }
        let name = read_string(self.string_token()?)?;
        self.expect(b':')?;
        let member = Member { start: self.out.len(), name };
        write_string(&member.name, &mut self.out);
        self.out.push(':');
        if let Some(Open::Object { members, sorted, .. }) = self.open.last_mut() {
            if let Some(last) = members.last() {
                *sorted = *sorted && last.name.encode_utf16().lt(member.name.encode_utf16());
            }
            members.push(member);
        }
        Ok(())
    }

    /// The string token at the cursor, quotes included.
    fn string_token(&mut self) -> Result<&'a str, ValueError> {
        let rest = &self.text[self.at..];
        let mut octets = rest.bytes().enumerate().skip(1);
        while let Some((at, octet)) = octets.next() {
            match octet {
                b'"' => {
                    self.at += at + 1;
                    return Ok(&rest[..=at]);
                }
                b'\\' => {
                    octets.next();
                }
                _ => {}
            }
        }
        Err(ValueError::JsonSyntax)
    }

    fn literal(&mut self, literal: &str) -> Result<(), ValueError> {
        if !self.text[self.at..].starts_with(literal) {
            return Err(ValueError::JsonSyntax);
        }
        self.at += literal.len();
        self.out.push_str(literal);
        Ok(())
    }

    fn number(&mut self) -> Result<(), ValueError> {
        let rest = &self.text.as_bytes()[self.at..];
        let digits = |from: usize| rest[from..].iter().take_while(|b| b.is_ascii_digit()).count();
        let whole = usize::from(rest.first() == Some(&b'-'));
        let mut end = whole + digits(whole);
        if end == whole || (rest[whole] == b'0' && end > whole + 1) {
            return Err(ValueError::JsonSyntax);
        }
        let whole_end = end;
        if rest.get(end) == Some(&b'.') {
            let count = digits(end + 1);
            if count == 0 {
                return Err(ValueError::JsonSyntax);
            }
            end += 1 + count;
        }
        if matches!(rest.get(end), Some(b'e' | b'E')) {
            let signed = usize::from(matches!(rest.get(end + 1), Some(b'+' | b'-')));
            let count = digits(end + 1 + signed);
            if count == 0 {
                return Err(ValueError::JsonSyntax);
            }
            end += 1 + signed + count;
        }
        let token = &self.text[self.at..self.at + end];
        self.at += end;
        if end == whole_end {
            let integer: i64 = token.parse().map_err(|_| ValueError::JsonNumber)?;
            if !(-MAX_SAFE_INTEGER..=MAX_SAFE_INTEGER).contains(&integer) {
                return Err(ValueError::JsonNumber);
            }
            self.out.push_str(if integer == 0 { "0" } else { token });
            return Ok(());
        }
        let number: f64 = token.parse().map_err(|_| ValueError::JsonSyntax)?;
        if !number.is_finite() {
            return Err(ValueError::JsonNumber);
        }
        let canonical = es6(number);
        // Such as 1e20: its canonical text would be an integer that readers disagree on.
        if number.abs() > MAX_SAFE_INTEGER as f64 && !canonical.contains('e') {
            return Err(ValueError::JsonNumber);
        }
        self.out.push_str(&canonical);
        Ok(())
    }
}

/// Puts the members of an object, which end the output, in the order of their names' UTF-16 code units.
fn sort_members(out: &mut String, start: usize, members: Vec<Member<'_>>) -> Result<(), ValueError> {
    let written = out.split_off(start);
    let mut ends: Vec<usize> = members.iter().skip(1).map(|next| next.start - 1 - start).collect();
    ends.push(written.len());
    let mut spans: Vec<(Member<'_>, usize)> = members.into_iter().zip(ends).collect();
    spans.sort_by(|(a, _), (b, _)| a.name.encode_utf16().cmp(b.name.encode_utf16()));
    for pair in spans.windows(2) {
        if pair[0].0.name == pair[1].0.name {
            return Err(ValueError::JsonDuplicateName);
        }
    }
    for (i, (member, end)) in spans.iter().enumerate() {
        if i > 0 {
            out.push(',');
        }
        out.push_str(&written[member.start - start..*end]);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn canonical_texts() {
        for (text, canonical) in [
            (" null ", "null"),
            ("[ ]", "[]"),
            ("{ }", "{}"),
            ("[1, 2.0,-0, -0.0, 1e2, 1E-7, 0.1, 5e-324]", "[1,2,0,0,100,1e-7,0.1,5e-324]"),
            ("1e300", "1e+300"),
            ("9007199254740991", "9007199254740991"),
            (r#"{"b": {"d":1, "c" : [ {"z":0,"y":1} ]}, "a":null}"#, r#"{"a":null,"b":{"c":[{"y":1,"z":0}],"d":1}}"#),
            (r#""\u0000\u001F\u007f\/\"\\\n\u00e9\ud83d\ude00""#, "\"\\u0000\\u001f\u{7f}/\\\"\\\\\\né😀\""),
            // UTF-16 order: the surrogates of U+1F600 precede U+FB33.
            ("{\"\u{fb33}\":1,\"\u{1f600}\":2}", "{\"\u{1f600}\":2,\"\u{fb33}\":1}"),
        ] {
            assert_eq!(canonical_json(text).as_deref(), Ok(canonical), "{text}");
            assert_eq!(canonical_json(canonical).as_deref(), Ok(canonical), "{text}");
        }
    }

    #[test]
    fn refuses_what_has_no_canonical_form() {
        use ValueError::{JsonDuplicateName, JsonNumber, JsonSyntax};
        for (text, error) in [
            ("", JsonSyntax),
            ("nul", JsonSyntax),
            ("1 2", JsonSyntax),
            ("[1,]", JsonSyntax),
            ("[1", JsonSyntax),
            ("[1}", JsonSyntax),
            ("{\"a\":1,}", JsonSyntax),
            ("{\"a\"}", JsonSyntax),
            ("{a:1}", JsonSyntax),
            ("\"", JsonSyntax),
            ("\"\\", JsonSyntax),
            ("\"\\é\"", JsonSyntax),
            ("\"\u{1}\"", JsonSyntax),
            (r#""\ud800""#, JsonSyntax),
            (r#"{"\udc00":1}"#, JsonSyntax),
            ("01", JsonSyntax),
            ("-", JsonSyntax),
            ("+1", JsonSyntax),
            ("1.", JsonSyntax),
            (".5", JsonSyntax),
            ("1e", JsonSyntax),
            ("NaN", JsonSyntax),
            ("é", JsonSyntax),
            ("\u{a0}1", JsonSyntax),
            ("9007199254740992", JsonNumber),
            ("-9007199254740993", JsonNumber),
            ("1000000000000000000000000", JsonNumber),
            ("9007199254740993.0", JsonNumber),
            ("1e20", JsonNumber),
            ("1e400", JsonNumber),
            (r#"{"a":1,"a":2}"#, JsonDuplicateName),
            (r#"{"b":1,"a":2,"\u0062":3}"#, JsonDuplicateName),
        ] {
            assert_eq!(canonical_json(text), Err(error), "{text}");
        }
    }

    #[test]
    fn nesting_is_bounded_and_costs_no_stack() {
        let nested = |n: usize| "[".repeat(n) + &"]".repeat(n);
        assert_eq!(canonical_json(&nested(MAX_DEPTH)), Ok(nested(MAX_DEPTH)));
        assert_eq!(canonical_json(&nested(MAX_DEPTH + 2)), Err(ValueError::JsonDepth));
    }

    fn any_json() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i32>().prop_map(Into::into),
            any::<f64>()
                .prop_filter("has a canonical form", |f| f.abs() < 9e15 || f.abs() >= 1e21)
                .prop_map(Into::into),
            any::<String>().prop_map(Into::into),
        ];
        leaf.prop_recursive(4, 64, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Into::into),
                prop::collection::vec((any::<String>(), inner), 0..6)
                    .prop_map(|members| serde_json::Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn agrees_with_the_canonicalizer(value in any_json()) {
            let canonical = serde_json_canonicalizer::to_string(&value).expect("a JSON value");
            prop_assert_eq!(canonical_json(&value.to_string()), Ok(canonical.clone()));
            let pretty = serde_json::to_string_pretty(&value).expect("a JSON value");
            prop_assert_eq!(canonical_json(&pretty), Ok(canonical));
        }

        #[test]
        fn never_panics(text in "[\\[\\]{}\",:\\\\eE.0-9a-z+ \u{e9}-]{0,24}") {
            if let Ok(canonical) = canonical_json(&text) {
                prop_assert_eq!(canonical_json(&canonical), Ok(canonical.clone()));
                prop_assert!(serde_json::from_str::<serde_json::Value>(&text).is_ok());
            }
        }
    }
}
