//! Integers, decimals and floats as text.

use super::{FieldType, PortableType, ValueError};

/// Significant digits of the longest shortest-round-trip text of a binary64.
const FLOAT_DIGITS: usize = 17;

/// Whether `text` is a canonical base-10 integer: no sign but `-`, no leading zero, no `-0`.
pub(super) fn is_canonical_integer(text: &str) -> bool {
    match text.strip_prefix('-').unwrap_or(text).as_bytes() {
        [b'0'] => text.len() == 1,
        [b'1'..=b'9', rest @ ..] => rest.iter().all(u8::is_ascii_digit),
        _ => false,
    }
}

/// The RFC 8785 (ECMAScript) text of a finite number.
pub(super) fn es6(number: f64) -> String {
    debug_assert!(number.is_finite(), "callers refuse what is not finite");
    serde_json_canonicalizer::to_string(&number).expect("every finite number has a canonical text")
}

/// A binary64 from PostgreSQL's shortest float text, for float4 too: the number that the digits denote.
pub(super) fn float_from_postgres(text: &str) -> Result<f64, ValueError> {
    const KIND: PortableType = PortableType::Float;
    if matches!(text, "NaN" | "Infinity" | "-Infinity") {
        return Err(ValueError::NotFinite(KIND));
    }
    // `parse` also takes spellings that PostgreSQL does not write.
    let digits = |b: u8| b.is_ascii_digit() || matches!(b, b'.' | b'-' | b'+' | b'e');
    if !text.bytes().all(digits) {
        return Err(ValueError::Malformed(KIND));
    }
    let number: f64 = text.parse().map_err(|_| ValueError::Malformed(KIND))?;
    if !number.is_finite() {
        return Err(ValueError::OutOfRange(KIND));
    }
    // A numeric column that is mapped to float can have digits that would be lost.
    let mantissa = text.split('e').next().unwrap_or(text);
    let nonzero = |b: &u8| (b'1'..=b'9').contains(b);
    let significant = match (mantissa.bytes().position(|b| nonzero(&b)), mantissa.bytes().rposition(|b| nonzero(&b))) {
        (Some(first), Some(last)) => mantissa.as_bytes()[first..=last].iter().filter(|b| b.is_ascii_digit()).count(),
        _ => 0,
    };
    if significant > FLOAT_DIGITS || (significant > 0 && number == 0.0) {
        return Err(ValueError::Inexact);
    }
    Ok(if number == 0.0 { 0.0 } else { number })
}

/// A float from wire JSON, which has exactly one spelling.
pub(super) fn float_from_wire(raw: &str) -> Result<f64, ValueError> {
    let number: f64 = raw.parse().map_err(|_| ValueError::NotCanonical(PortableType::Float))?;
    if number.is_finite() && es6(number) == raw {
        Ok(number)
    } else {
        Err(ValueError::NotCanonical(PortableType::Float))
    }
}

/// The canonical decimal of PostgreSQL's numeric text, a part of that text.
pub(super) fn decimal_from_postgres<'a>(field: &FieldType, text: &'a str) -> Result<&'a str, ValueError> {
    const KIND: PortableType = PortableType::Decimal;
    if matches!(text, "NaN" | "Infinity" | "-Infinity") {
        return Err(ValueError::NotFinite(KIND));
    }
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let whole_ok = is_canonical_integer(whole) || whole == "-0";
    if !whole_ok || fraction.is_empty() || !fraction.bytes().all(|b| b.is_ascii_digit()) {
        return Err(ValueError::Malformed(KIND));
    }
    let trimmed = match text.split_once('.') {
        Some(_) => text.trim_end_matches('0').trim_end_matches('.'),
        None => text,
    };
    let canonical = if trimmed == "-0" { "0" } else { trimmed };
    check_declared(field, canonical)?;
    Ok(canonical)
}

/// Checks that `text` is the canonical form of a decimal that the field can hold.
pub(super) fn check_decimal(field: &FieldType, text: &str) -> Result<(), ValueError> {
    let (whole, fraction) = text.split_once('.').map_or((text, None), |(whole, fraction)| (whole, Some(fraction)));
    let canonical = match fraction {
        None => is_canonical_integer(whole),
        Some(fraction) => {
            (is_canonical_integer(whole) || whole == "-0")
                && fraction.bytes().all(|b| b.is_ascii_digit())
                && fraction.ends_with(|c: char| c != '0')
        }
    };
    if !canonical {
        return Err(ValueError::NotCanonical(PortableType::Decimal));
    }
    check_declared(field, text)
}

fn check_declared(field: &FieldType, canonical: &str) -> Result<(), ValueError> {
    let (whole, fraction) = canonical.split_once('.').unwrap_or((canonical, ""));
    if field.scale.is_some_and(|scale| fraction.len() as u64 > u64::from(scale)) {
        return Err(ValueError::Scale);
    }
    if let Some(precision) = field.precision {
        let whole_digits = whole.trim_start_matches('-').trim_start_matches('0').len() as i64;
        if whole_digits > i64::from(precision) - i64::from(field.scale.unwrap_or(0)) {
            return Err(ValueError::Precision);
        }
    }
    Ok(())
}
