//! Token decoding: whatever a client presents, and, behind a right MAC, whatever fields.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use tributary_shared::continuation::Continuation;
use tributary_shared::cursor::Cursor;
use tributary_shared::token::{Expected, KeyRing, Kind};
use uuid::Uuid;

static RING: LazyLock<KeyRing> =
    LazyLock::new(|| "1:AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE".parse().expect("a ring"));
const ME: Expected<'static> = Expected { user: "user-1", client: "client-1", scope: "templates_public" };
const REBUILD: Uuid = Uuid::from_u128(0x0197_e83a_f7e8_7e21_92c0_c621_732b_d5de);

/// Authentic tokens are canonical: they seal to the text that they were opened from.
fn check(text: &str) {
    if let Ok(cursor) = Cursor::open(&RING, text, &ME) {
        assert_eq!(cursor.seal(&RING), text);
    }
    if let Ok(continuation) = Continuation::open(&RING, text, &ME, REBUILD) {
        assert_eq!(continuation.seal_with(&RING, RING.signing_key()).as_deref(), Ok(text));
    }
}

fuzz_target!(|data: &[u8]| {
    if let Ok(text) = std::str::from_utf8(data) {
        check(text);
    }
    for kind in [Kind::Incremental, Kind::Rebuild] {
        check(&RING.seal(kind, data));
    }
});
