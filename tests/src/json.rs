//! JSON as the reference client reads it: duplicate members are refused and numbers keep their text, because
//! contract.md section 1 says how a number is written, not only what it is worth.
//!
//! Written apart from the server's encoder on purpose, so that the two can disagree. Deliberately absent: leniency
//! of any kind (comments, trailing commas, lone surrogates, unbounded nesting).

use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Nesting past this is refused, so that a hostile answer cannot exhaust the stack.
const MAX_DEPTH: usize = 128;

/// A JSON value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Json {
    /// `null`
    Null,
    /// `true` or `false`
    Bool(bool),
    /// A number, as it was written.
    Number(String),
    /// A string.
    Text(String),
    /// An array.
    List(Vec<Json>),
    /// An object; no name stands twice.
    Object(BTreeMap<String, Json>),
}

/// Octets that are not strict JSON. Says where, never what.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not strict JSON at octet {at}: {reason}")]
pub struct JsonError {
    at: usize,
    reason: &'static str,
}

/// A value that RFC 8785 cannot represent faithfully.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("outside the domain of RFC 8785")]
pub struct NotRepresentable;

impl Json {
    /// Parse one JSON value that fills `source`.
    ///
    /// # Errors
    /// `source` is not strict JSON.
    pub fn parse(source: &[u8]) -> Result<Self, JsonError> {
        let text = std::str::from_utf8(source)
            .map_err(|error| JsonError { at: error.valid_up_to(), reason: "invalid UTF-8" })?;
        let mut parser = Parser { text, at: 0 };
        parser.space();
        let value = parser.value(0)?;
        parser.space();
        if parser.at == text.len() { Ok(value) } else { Err(parser.error("octets after the value")) }
    }

    /// A string value.
    pub fn text(value: impl Into<String>) -> Self {
        Self::Text(value.into())
    }

    /// An integer value.
    pub fn int(value: i64) -> Self {
        Self::Number(value.to_string())
    }

    /// An object of the given members; a later one replaces an earlier one of its name.
    pub fn object<const N: usize>(members: [(&str, Self); N]) -> Self {
        Self::Object(members.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
    }

    /// The member `name` of an object.
    pub fn get(&self, name: &str) -> Option<&Self> {
        match self {
            Self::Object(members) => members.get(name),
            _ => None,
        }
    }

    /// The content of a string.
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The elements of an array.
    pub fn as_list(&self) -> Option<&[Self]> {
        match self {
            Self::List(list) => Some(list),
            _ => None,
        }
    }

    /// The members of an object.
    pub fn as_object(&self) -> Option<&BTreeMap<String, Self>> {
        match self {
            Self::Object(members) => Some(members),
            _ => None,
        }
    }

    /// A boolean.
    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// An envelope integer: written without fraction or exponent, within ±(2^53−1) (contract.md section 4).
    pub fn as_int(&self) -> Option<i64> {
        match self {
            Self::Number(text) if is_integer(text) => {
                text.parse().ok().filter(|value: &i64| value.unsigned_abs() < 1 << 53)
            }
            _ => None,
        }
    }

    /// The RFC 8785 text of this value.
    ///
    /// # Errors
    /// A number is not finite as a binary64, or an integer lies outside ±(2^53−1).
    pub fn canonical(&self) -> Result<String, NotRepresentable> {
        let mut out = String::new();
        self.write(&mut out)?;
        Ok(out)
    }

    fn write(&self, out: &mut String) -> Result<(), NotRepresentable> {
        match self {
            Self::Null => out.push_str("null"),
            Self::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
            Self::Number(text) => {
                let integer = text.strip_prefix('-').unwrap_or(text);
                if integer.bytes().all(|b| b.is_ascii_digit())
                    && integer.parse::<u64>().map_or(true, |value| value >= 1 << 53)
                {
                    return Err(NotRepresentable);
                }
                out.push_str(&es6_number(text.parse().map_err(|_| NotRepresentable)?).ok_or(NotRepresentable)?);
            }
            Self::Text(text) => write_string(text, out),
            Self::List(list) => {
                out.push('[');
                for (i, value) in list.iter().enumerate() {
                    if i > 0 {
                        out.push(',');
                    }
                    value.write(out)?;
                }
                out.push(']');
            }
            Self::Object(members) => {
                let mut sorted: Vec<_> = members.iter().collect();
                sorted.sort_by_cached_key(|(name, _)| name.encode_utf16().collect::<Vec<_>>());
                out.push('{');
                for (i, (name, value)) in sorted.into_iter().enumerate() {
                    if i > 0 {
                        out.push(',');
                    }
                    write_string(name, out);
                    out.push(':');
                    value.write(out)?;
                }
                out.push('}');
            }
        }
        Ok(())
    }
}

/// Whether `text` is a base 10 integer in its only canonical form.
pub fn is_integer(text: &str) -> bool {
    let digits = text.strip_prefix('-').unwrap_or(text);
    text == "0" || (!digits.is_empty() && !digits.starts_with('0') && digits.bytes().all(|b| b.is_ascii_digit()))
}

/// The RFC 8785 text of a finite double; `None` for the others.
pub fn es6_number(value: f64) -> Option<String> {
    if !value.is_finite() {
        return None;
    }
    if value == 0.0 {
        return Some("0".to_owned());
    }
    // Rust's exponent form holds the shortest digits that round-trip, which are ES6's digits.
    let scientific = format!("{:e}", value.abs());
    let (mantissa, exponent) = scientific.split_once('e')?;
    let digits: String = mantissa.chars().filter(|c| *c != '.').collect();
    let point = exponent.parse::<i32>().ok()? + 1;
    let count = i32::try_from(digits.len()).ok()?;
    let mut out = String::from(if value < 0.0 { "-" } else { "" });
    match point {
        n if count <= n && n <= 21 => {
            out.push_str(&digits);
            out.extend(std::iter::repeat_n('0', (n - count) as usize));
        }
        n if 0 < n && n <= 21 => {
            let (whole, fraction) = digits.split_at(n as usize);
            write!(out, "{whole}.{fraction}").ok()?;
        }
        n if -6 < n && n <= 0 => {
            out.push_str("0.");
            out.extend(std::iter::repeat_n('0', (-n) as usize));
            out.push_str(&digits);
        }
        n => {
            let (first, rest) = digits.split_at(1);
            out.push_str(first);
            if !rest.is_empty() {
                write!(out, ".{rest}").ok()?;
            }
            write!(out, "e{}{}", if n > 0 { "+" } else { "-" }, (n - 1).abs()).ok()?;
        }
    }
    Some(out)
}

fn write_string(text: &str, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\u{8}' => out.push_str("\\b"),
            '\t' => out.push_str("\\t"),
            '\n' => out.push_str("\\n"),
            '\u{c}' => out.push_str("\\f"),
            '\r' => out.push_str("\\r"),
            c if (c as u32) < 0x20 => {
                let hex = b"0123456789abcdef";
                out.push_str("\\u00");
                out.push(char::from(hex[(c as usize) >> 4]));
                out.push(char::from(hex[(c as usize) & 15]));
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
}

impl Parser<'_> {
    fn error(&self, reason: &'static str) -> JsonError {
        JsonError { at: self.at, reason }
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn take(&mut self, octet: u8, reason: &'static str) -> Result<(), JsonError> {
        if self.peek() == Some(octet) {
            self.at += 1;
            Ok(())
        } else {
            Err(self.error(reason))
        }
    }

    fn literal(&mut self, literal: &str, value: Json) -> Result<Json, JsonError> {
        if self.text.as_bytes()[self.at..].starts_with(literal.as_bytes()) {
            self.at += literal.len();
            Ok(value)
        } else {
            Err(self.error("unknown literal"))
        }
    }

    fn value(&mut self, depth: usize) -> Result<Json, JsonError> {
        if depth > MAX_DEPTH {
            return Err(self.error("nested too deeply"));
        }
        match self.peek() {
            Some(b'{') => self.members(depth),
            Some(b'[') => self.elements(depth),
            Some(b'"') => Ok(Json::Text(self.string()?)),
            Some(b't') => self.literal("true", Json::Bool(true)),
            Some(b'f') => self.literal("false", Json::Bool(false)),
            Some(b'n') => self.literal("null", Json::Null),
            Some(b'-' | b'0'..=b'9') => self.number(),
            _ => Err(self.error("no value")),
        }
    }

    fn members(&mut self, depth: usize) -> Result<Json, JsonError> {
        let mut members = BTreeMap::new();
        self.at += 1;
        self.space();
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(Json::Object(members));
        }
        loop {
            self.space();
            if self.peek() != Some(b'"') {
                return Err(self.error("no member name"));
            }
            let name = self.string()?;
            self.space();
            self.take(b':', "no colon")?;
            self.space();
            let value = self.value(depth + 1)?;
            if members.insert(name, value).is_some() {
                return Err(self.error("duplicate member"));
            }
            self.space();
            if self.peek() == Some(b',') {
                self.at += 1;
            } else {
                self.take(b'}', "object without end")?;
                return Ok(Json::Object(members));
            }
        }
    }

    fn elements(&mut self, depth: usize) -> Result<Json, JsonError> {
        let mut list = Vec::new();
        self.at += 1;
        self.space();
        if self.peek() == Some(b']') {
            self.at += 1;
            return Ok(Json::List(list));
        }
        loop {
            self.space();
            list.push(self.value(depth + 1)?);
            self.space();
            if self.peek() == Some(b',') {
                self.at += 1;
            } else {
                self.take(b']', "array without end")?;
                return Ok(Json::List(list));
            }
        }
    }

    fn number(&mut self) -> Result<Json, JsonError> {
        let start = self.at;
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        match self.peek() {
            Some(b'0') => self.at += 1,
            Some(b'1'..=b'9') => self.digits()?,
            _ => return Err(self.error("number without digits")),
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits()?;
        }
        Ok(Json::Number(self.text[start..self.at].to_owned()))
    }

    fn digits(&mut self) -> Result<(), JsonError> {
        let start = self.at;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        if self.at == start { Err(self.error("number without digits")) } else { Ok(()) }
    }

    fn string(&mut self) -> Result<String, JsonError> {
        self.at += 1;
        let mut out = String::new();
        loop {
            let rest = &self.text.as_bytes()[self.at..];
            let plain = rest
                .iter()
                .position(|b| matches!(b, b'"' | b'\\' | 0..=0x1f))
                .ok_or_else(|| self.error("string without end"))?;
            // The stops are ASCII, so the slice ends on a character boundary.
            out.push_str(&self.text[self.at..self.at + plain]);
            self.at += plain;
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(out);
                }
                Some(b'\\') => {
                    self.at += 1;
                    out.push(self.escape()?);
                }
                _ => return Err(self.error("control character in a string")),
            }
        }
    }

    fn escape(&mut self) -> Result<char, JsonError> {
        let escape = self.peek();
        self.at += 1;
        Ok(match escape {
            Some(b'"') => '"',
            Some(b'\\') => '\\',
            Some(b'/') => '/',
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            Some(b'u') => {
                let unit = self.hex4()?;
                let scalar = if (0xd800..0xdc00).contains(&unit) {
                    self.take(b'\\', "lone surrogate")?;
                    self.take(b'u', "lone surrogate")?;
                    let low = self.hex4()?;
                    if !(0xdc00..0xe000).contains(&low) {
                        return Err(self.error("lone surrogate"));
                    }
                    0x1_0000 + ((unit - 0xd800) << 10) + (low - 0xdc00)
                } else {
                    unit
                };
                char::from_u32(scalar).ok_or_else(|| self.error("lone surrogate"))?
            }
            _ => return Err(self.error("unknown escape")),
        })
    }

    fn hex4(&mut self) -> Result<u32, JsonError> {
        let digits = self
            .text
            .as_bytes()
            .get(self.at..self.at + 4)
            .filter(|digits| digits.iter().all(u8::is_ascii_hexdigit))
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .ok_or_else(|| self.error("unicode escape"))?;
        let unit = u32::from_str_radix(digits, 16).map_err(|_| self.error("unicode escape"))?;
        self.at += 4;
        Ok(unit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn refuses_what_is_not_strict() {
        for source in [
            "",
            " ",
            "{",
            "[1,]",
            "{\"a\":1,}",
            "{\"a\":1,\"a\":2}",
            "01",
            "-",
            "1.",
            ".5",
            "1e",
            "+1",
            "NaN",
            "Infinity",
            "nul",
            "\"\\ud800\"",
            "\"\\ud800\\u0041\"",
            "\"\\udc00\"",
            "\"\\x\"",
            "\"\u{1}\"",
            "\"a",
            "1 2",
            "'a'",
            "[1 2]",
            "{a:1}",
            "\"\\u00\"",
            "\"\\",
        ] {
            assert!(Json::parse(source.as_bytes()).is_err(), "{source:?}");
        }
        assert!(Json::parse(b"\"\xff\"").is_err());
        assert!(Json::parse("[".repeat(5000).as_bytes()).is_err());
    }

    #[test]
    fn numbers_keep_their_text_and_integers_their_bounds() {
        assert_eq!(Json::parse(b" -0 "), Ok(Json::Number("-0".to_owned())));
        assert_eq!(Json::parse(b"9007199254740991").map(|v| v.as_int()), Ok(Some((1 << 53) - 1)));
        for source in ["9007199254740992", "1.0", "1e0", "-0", "\"1\""] {
            assert_eq!(Json::parse(source.as_bytes()).map(|v| v.as_int()), Ok(None), "{source}");
        }
    }

    #[test]
    fn rfc_8785_numbers() {
        // From the table of RFC 8785, appendix B.
        for (bits, text) in [
            (0x0000_0000_0000_0000, "0"),
            (0x8000_0000_0000_0000, "0"),
            (0x0000_0000_0000_0001, "5e-324"),
            (0x7fef_ffff_ffff_ffff, "1.7976931348623157e+308"),
            (0x4340_0000_0000_0000, "9007199254740992"),
            (0x4430_0000_0000_0000, "295147905179352830000"),
            (0x44b5_2d02_c7e1_4af5, "9.999999999999997e+22"),
            (0x44b5_2d02_c7e1_4af6, "1e+23"),
            (0x444b_1ae4_d6e2_ef4e, "999999999999999700000"),
            (0x444b_1ae4_d6e2_ef50, "1e+21"),
            (0x3eb0_c6f7_a0b5_ed8c, "9.999999999999997e-7"),
            (0x3eb0_c6f7_a0b5_ed8d, "0.000001"),
            (0x41b3_de43_5555_5553, "333333333.3333332"),
            (0xbecb_f647_612f_3696, "-0.0000033333333333333333"),
        ] {
            assert_eq!(es6_number(f64::from_bits(bits)).as_deref(), Some(text));
        }
        assert_eq!(es6_number(f64::NAN), None);
    }

    proptest! {
        #[test]
        fn agrees_with_serde_json_on_any_text(text in ".*") {
            let encoded = serde_json::to_string(&text).unwrap();
            prop_assert_eq!(Json::parse(encoded.as_bytes()), Ok(Json::Text(text.clone())));
            let own = Json::Text(text.clone()).canonical().unwrap();
            prop_assert_eq!(serde_json::from_str::<String>(&own).unwrap(), text);
        }

        #[test]
        fn numbers_round_trip(bits in any::<u64>()) {
            let value = f64::from_bits(bits);
            if let Some(text) = es6_number(value) {
                // Adding zero takes the sign off a negative zero, which has no text of its own.
                prop_assert_eq!(text.parse::<f64>().unwrap().to_bits(), (value + 0.0).to_bits());
            }
        }

        #[test]
        fn never_panics(octets in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = Json::parse(&octets);
        }
    }
}
