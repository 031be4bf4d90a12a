//! Dates and times of day as fixed-width text. No arithmetic: PostgreSQL has already put instants in UTC.

/// Octets of `YYYY-MM-DD`.
pub(super) const DATE_LEN: usize = 10;
/// Octets of `HH:MM:SS`.
const CLOCK_LEN: usize = 8;

/// Why a text is not a date or a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CalendarError {
    /// Another grammar.
    Malformed,
    /// The right grammar, but no such day or time of day.
    OutOfRange,
}

fn two(digits: &[u8]) -> Option<u32> {
    match digits {
        [tens @ b'0'..=b'9', units @ b'0'..=b'9'] => Some(u32::from(tens - b'0') * 10 + u32::from(units - b'0')),
        _ => None,
    }
}

/// Checks exactly `YYYY-MM-DD`, a day of the proleptic Gregorian calendar of the years 0001 to 9999.
pub(super) fn check_date(text: &[u8]) -> Result<(), CalendarError> {
    let numbers = match text {
        [y0, y1, y2, y3, b'-', m0, m1, b'-', d0, d1] => {
            (two(&[*y0, *y1]), two(&[*y2, *y3]), two(&[*m0, *m1]), two(&[*d0, *d1]))
        }
        _ => return Err(CalendarError::Malformed),
    };
    let (Some(century), Some(year), Some(month), Some(day)) = numbers else { return Err(CalendarError::Malformed) };
    let year = century * 100 + year;
    let leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let days = match month {
        1 | 3 | 5 | 7 | 8 | 10 | 12 => 31,
        4 | 6 | 9 | 11 => 30,
        2 if leap => 29,
        2 => 28,
        _ => return Err(CalendarError::OutOfRange),
    };
    if year == 0 || !(1..=days).contains(&day) { Err(CalendarError::OutOfRange) } else { Ok(()) }
}

/// Checks exactly `HH:MM:SS` below 24:00:00, without leap seconds.
fn check_clock(text: &[u8]) -> Result<(), CalendarError> {
    let numbers = match text {
        [h0, h1, b':', m0, m1, b':', s0, s1] => (two(&[*h0, *h1]), two(&[*m0, *m1]), two(&[*s0, *s1])),
        _ => return Err(CalendarError::Malformed),
    };
    let (Some(hour), Some(minute), Some(second)) = numbers else { return Err(CalendarError::Malformed) };
    if hour > 23 || minute > 59 || second > 59 { Err(CalendarError::OutOfRange) } else { Ok(()) }
}

/// Checks exactly `HH:MM:SS.ffffff`.
pub(super) fn check_time(text: &[u8]) -> Result<(), CalendarError> {
    let (clock, fraction) = text.split_at_checked(CLOCK_LEN).ok_or(CalendarError::Malformed)?;
    match fraction {
        [b'.', digits @ ..] if digits.len() == 6 && digits.iter().all(u8::is_ascii_digit) => check_clock(clock),
        _ => Err(CalendarError::Malformed),
    }
}

/// Checks exactly `YYYY-MM-DDTHH:MM:SS.ffffffZ`.
pub(super) fn check_datetime(text: &[u8]) -> Result<(), CalendarError> {
    let (date, rest) = text.split_at_checked(DATE_LEN).ok_or(CalendarError::Malformed)?;
    match rest {
        [b'T', time @ .., b'Z'] => check_date(date).and_then(|()| check_time(time)),
        _ => Err(CalendarError::Malformed),
    }
}

/// Appends PostgreSQL's `HH:MM:SS[.f…]` with exactly six fraction digits.
pub(super) fn write_time(text: &str, out: &mut String) -> Result<(), CalendarError> {
    let (clock, fraction) = text.split_at_checked(CLOCK_LEN).ok_or(CalendarError::Malformed)?;
    check_clock(clock.as_bytes())?;
    let digits = match fraction.strip_prefix('.') {
        Some(digits) if (1..=6).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit()) => digits,
        None if fraction.is_empty() => "",
        _ => return Err(CalendarError::Malformed),
    };
    out.push_str(clock);
    out.push('.');
    out.push_str(digits);
    out.push_str(&"000000"[digits.len()..]);
    Ok(())
}

/// Why PostgreSQL's date or timestamp text is not of the years 0001 to 9999, if that is the reason.
pub(super) fn postgres_range_error(text: &str) -> Option<CalendarError> {
    let beyond = text == "infinity"
        || text == "-infinity"
        || text.ends_with(" BC")
        // Years beyond 9999 have five digits and more.
        || text.bytes().take_while(u8::is_ascii_digit).count() > 4;
    beyond.then_some(CalendarError::OutOfRange)
}
