//! What makes a token forged, for both kinds; the wire format as annotated hex.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use proptest::prelude::*;
use uuid::Uuid;

use super::*;
use crate::continuation::{self, Continuation, Lapse, Refusal, SESSION_MICROS};
use crate::cursor::{self, Cursor, Stale};
use crate::lsn::Lsn;
use crate::position::Position;

/// One thing that differs.
type Change<T> = dyn Fn(&mut T);

const ME: Expected<'static> = Expected { user: "user-1", client: "client-1", scope: "templates_public" };
const REBUILD: Uuid = Uuid::from_u128(0x0197_e83a_f7e8_7e21_92c0_c621_732b_d5de);

/// A ring of keys with these ids; the secret of id n is 32 octets of n.
fn ring(ids: &[u8]) -> KeyRing {
    let entry = |id: &u8| format!("{id}:{}", URL_SAFE_NO_PAD.encode([*id; 32]));
    ids.iter().map(entry).collect::<Vec<_>>().join(",").parse().expect("a ring")
}

fn effect(commit_lsn: u64, event: u64, effect: u32) -> Position {
    Position::effect(Lsn::new(commit_lsn).expect("small"), event, effect).expect("in range")
}

fn end(commit_lsn: u64) -> Position {
    Position::transaction_end(Lsn::new(commit_lsn).expect("small")).expect("not zero")
}

fn lineage() -> Lineage {
    Lineage {
        stream_generation: Uuid::from_u128(7),
        client_generation: 4,
        schema_hash: [0xab; 32],
        membership_generation: 2,
        retention_generation: 3,
    }
}

fn cursor_at(position: Position) -> Cursor {
    Cursor { lineage: lineage(), bindings: Bindings::of(&ME), position, issued_at: 1_800_000_000_000_000 }
}

fn continuation() -> Continuation {
    Continuation {
        lineage: lineage(),
        bindings: Bindings::of(&ME),
        session_id: Uuid::from_u128(9),
        rebuild_id: REBUILD,
        snapshot_boundary: end(0x20),
        next_row_ordinal: 1000,
        page_limit: 500,
        accepted_write_epoch: 6,
        issued_at: 1_800_000_000_000_000,
    }
}

/// Texts of all shapes of tokens that the ring's first key sealed.
fn tokens(ring: &KeyRing) -> Vec<String> {
    let cursors = [Position::GENERATION_START, effect(0x20, 5, 6), end(0x20)].map(|at| cursor_at(at).seal(ring));
    let rebuild = continuation().seal_with(ring, ring.signing_key()).expect("own key");
    cursors.into_iter().chain([rebuild]).collect()
}

/// Nobody takes this text for a token.
fn assert_forged(ring: &KeyRing, text: &str) {
    assert_eq!(Cursor::open(ring, text, &ME), Err(Forged), "{text}");
    assert_eq!(Continuation::open(ring, text, &ME, REBUILD), Err(Forged), "{text}");
}

fn octets(text: &str) -> Vec<u8> {
    URL_SAFE_NO_PAD.decode(text.strip_prefix(PREFIX).expect("prefix")).expect("base64url")
}

fn text(octets: &[u8]) -> String {
    format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(octets))
}

#[test]
fn a_token_opens_to_what_was_sealed() {
    let ring = ring(&[1]);
    for position in [Position::GENERATION_START, effect(1, 0, 0), effect(0x20, 5, 6), end(0x20)] {
        let cursor = cursor_at(position);
        assert_eq!(Cursor::open(&ring, &cursor.seal(&ring), &ME), Ok(cursor));
    }
    let rebuild = continuation().seal_with(&ring, ring.signing_key()).expect("own key");
    assert_eq!(Continuation::open(&ring, &rebuild, &ME, REBUILD), Ok(continuation()));
}

/// Value and annotated octets. The MACs were computed by another implementation (Python's hmac).
#[test]
fn the_format_does_not_change() {
    let ring = ring(&[1]);
    let common = concat!(
        "00000000000000000000000000000007", // stream_generation
        "0000000000000004",                 // client_generation
        "abababababababababababababababababababababababababababababababab", // schema_hash
        "0000000000000002",                 // membership_generation
        "0000000000000003",                 // retention_generation
        "b1cb9d6cae4549560188619b3254d25b", // user_binding
        "235744fc092156285be181c83b78b715", // client_binding
        "097334be0618c02718f54a9ede8824b93085cbb250dc636ff2e16676933cf49b", // scope_id, by digest
    );
    let incremental = [
        "01",
        "01",
        "0000000000000001", // version, kind, key_id
        common,
        "01",
        "0000000000000020",
        "0000000000000005",
        "00000006",         // effect: commit_lsn, event_ordinal, effect_ordinal
        "0006651728988000", // issued_at
        "eb870a83b20ecb33139b17a297314c08dc8016d34b909230a922ce8829a48157",
    ];
    let rebuild = [
        "01",
        "02",
        "0000000000000001", // version, kind, key_id
        common,
        "00000000000000000000000000000009", // session_id
        "0197e83af7e87e2192c0c621732bd5de", // rebuild_id
        "02",
        "0000000000000020", // snapshot_boundary, a transaction end: commit_lsn
        "00000000000003e8", // next_row_ordinal
        "01f4",             // page_limit
        "0000000000000006", // accepted_write_epoch
        "0006651728988000", // issued_at
        "0006652b466fe000", // expires_at
        "87e82b0feae6417366e2381702a3c1a0c21721c1a05342a6db0cecdbb866464b",
    ];
    let hex = |text: &str| octets(text).iter().fold(String::new(), |hex, octet| hex + &format!("{octet:02x}"));
    assert_eq!(hex(&cursor_at(effect(0x20, 5, 6)).seal(&ring)), incremental.concat());
    let sealed = continuation().seal_with(&ring, ring.signing_key()).expect("own key");
    assert_eq!(hex(&sealed), rebuild.concat());
}

#[test]
fn every_flipped_bit_is_forged() {
    let ring = ring(&[1, 2]);
    for token in tokens(&ring) {
        let whole = octets(&token);
        for bit in 0..whole.len() * 8 {
            let mut flipped = whole.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_forged(&ring, &text(&flipped));
        }
        for index in 0..token.len() {
            for bit in 0..7 {
                let mut flipped = token.clone().into_bytes();
                flipped[index] ^= 1 << bit;
                assert_forged(&ring, std::str::from_utf8(&flipped).expect("ASCII"));
            }
        }
    }
}

#[test]
fn truncated_and_extended_tokens_are_forged() {
    let ring = ring(&[1]);
    for token in tokens(&ring) {
        for length in 0..token.len() {
            assert_forged(&ring, &token[..length]);
            assert_forged(&ring, &token[length + 1..]);
        }
        let whole = octets(&token);
        for length in 0..whole.len() {
            assert_forged(&ring, &text(&whole[..length]));
        }
        for more in ["A", "AA", "AAAA", " ", "\n", "=", "\0", ".", &"A".repeat(100_000)] {
            assert_forged(&ring, &format!("{token}{more}"));
            assert_forged(&ring, &format!("{more}{token}"));
        }
        assert_forged(&ring, &format!("{token}{token}"));
        assert_forged(&ring, &text(&[whole.as_slice(), &[0]].concat()));
    }
}

/// One token has one text.
#[test]
fn reencoded_tokens_are_forged() {
    let ring = ring(&[1]);
    let mut trailing_bits = 0;
    for token in tokens(&ring) {
        let encoded = token.strip_prefix(PREFIX).expect("prefix");
        assert_forged(&ring, encoded);
        assert_forged(&ring, &format!("V1.{encoded}"));
        assert_forged(&ring, &format!("v2.{encoded}"));
        assert_forged(&ring, &format!("v1.v1.{encoded}"));
        assert_forged(&ring, &format!("{token}="));
        assert_forged(&ring, &format!("{token}=="));
        if token.contains(['-', '_']) {
            assert_forged(&ring, &token.replace('-', "+").replace('_', "/"));
        }
        let alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
        for last in alphabet.chars().filter(|last| !token.ends_with(*last)) {
            // Where the length leaves unused bits, some of these decode to the same octets in a lax decoder.
            trailing_bits += usize::from(!octets(&token).len().is_multiple_of(3));
            assert_forged(&ring, &format!("{}{last}", &token[..token.len() - 1]));
        }
    }
    assert!(trailing_bits > 0, "some token has unused bits");
}

#[test]
fn another_user_client_scope_or_attempt_is_forged() {
    let ring = ring(&[1]);
    let cursor = cursor_at(end(0x20)).seal(&ring);
    let rebuild = continuation().seal_with(&ring, ring.signing_key()).expect("own key");
    let others = [
        Expected { user: "user-2", ..ME },
        Expected { client: "client-2", ..ME },
        Expected { scope: "templates_publi", ..ME },
        Expected { user: "user-1c", client: "lient-1", ..ME },
        Expected { user: ME.client, client: ME.user, ..ME },
        Expected { user: "", ..ME },
    ];
    for other in others {
        assert_eq!(Cursor::open(&ring, &cursor, &other), Err(Forged));
        assert_eq!(Continuation::open(&ring, &rebuild, &other, REBUILD), Err(Forged));
    }
    assert_eq!(Continuation::open(&ring, &rebuild, &ME, Uuid::from_u128(1)), Err(Forged));
}

#[test]
fn kinds_are_not_interchangeable() {
    let ring = ring(&[1]);
    let cursor = cursor_at(end(0x20)).seal(&ring);
    let rebuild = continuation().seal_with(&ring, ring.signing_key()).expect("own key");
    assert_eq!(Continuation::open(&ring, &cursor, &ME, REBUILD), Err(Forged));
    assert_eq!(Cursor::open(&ring, &rebuild, &ME), Err(Forged));
    // Nor by the kind octet alone: each kind has its own MAC key.
    let fields = &octets(&cursor)[HEADER_OCTETS..];
    let fields = &fields[..fields.len() - MAC_OCTETS];
    let relabelled = ring.seal(Kind::Rebuild, fields);
    assert_ne!(
        octets(&relabelled)[octets(&cursor).len() - MAC_OCTETS..],
        octets(&cursor)[octets(&cursor).len() - MAC_OCTETS..]
    );
    assert_eq!(Cursor::open(&ring, &relabelled, &ME), Err(Forged));
}

/// The header is checked by itself, too, and not only by way of the MAC key.
#[test]
fn authentic_tokens_of_another_version_or_kind_are_forged() {
    use hmac::{Hmac, KeyInit as _, Mac as _};
    let mac = |key: &[u8], octets: &[u8]| {
        let keyed = Hmac::<sha2::Sha256>::new_from_slice(key).expect("any length");
        keyed.chain_update(octets).finalize().into_bytes()
    };
    let ring = ring(&[1]);
    let key = mac(&[1; 32], Kind::Incremental.derivation_label());
    let whole = octets(&cursor_at(end(0x20)).seal(&ring));
    let remade = |index: usize, octet: u8| {
        let mut body = whole[..whole.len() - MAC_OCTETS].to_vec();
        body[index] = octet;
        text(&[body.as_slice(), &mac(&key, &body)].concat())
    };
    assert!(Cursor::open(&ring, &remade(0, VERSION), &ME).is_ok());
    assert_forged(&ring, &remade(0, 2));
    assert_forged(&ring, &remade(0, 0));
    assert_forged(&ring, &remade(1, 2));
}

/// Even under a right MAC, only canonical fields are a token.
#[test]
fn authentic_but_malformed_fields_are_forged() {
    let ring = ring(&[1]);
    let strip = |token: &str| {
        let whole = octets(token);
        whole[HEADER_OCTETS..whole.len() - MAC_OCTETS].to_vec()
    };
    let cursor = strip(&cursor_at(effect(0x20, 5, 6)).seal(&ring));
    let resealed = |fields: &[u8]| Cursor::open(&ring, &ring.seal(Kind::Incremental, fields), &ME);
    assert!(resealed(&cursor).is_ok());
    assert_eq!(resealed(&cursor[..cursor.len() - 1]), Err(Forged));
    assert_eq!(resealed(&[cursor.as_slice(), &[0]].concat()), Err(Forged));
    let kind_at = 136;
    for kind in [0, 2, 3, 255] {
        let mut other = cursor.clone();
        other[kind_at] = kind;
        assert_eq!(resealed(&other), Err(Forged), "position kind {kind} with the members of an effect");
    }
    let mut zero_lsn = cursor.clone();
    zero_lsn[kind_at + 1..kind_at + 9].fill(0);
    assert_eq!(resealed(&zero_lsn), Err(Forged));
    let mut wide_lsn = cursor;
    wide_lsn[kind_at + 1] = 0x80;
    assert_eq!(resealed(&wide_lsn), Err(Forged));

    let reopened = |changed: Continuation| {
        let sealed = changed.seal_with(&ring, ring.signing_key()).expect("own key");
        Continuation::open(&ring, &sealed, &ME, REBUILD)
    };
    assert!(reopened(continuation()).is_ok());
    assert_eq!(reopened(Continuation { page_limit: 0, ..continuation() }), Err(Forged));
    assert_eq!(reopened(Continuation { page_limit: 1001, ..continuation() }), Err(Forged));
    assert_eq!(reopened(Continuation { snapshot_boundary: effect(1, 0, 0), ..continuation() }), Err(Forged));
    let mut longer_lived = strip(&continuation().seal_with(&ring, ring.signing_key()).expect("own key"));
    *longer_lived.last_mut().expect("not empty") ^= 1;
    let sealed = ring.seal(Kind::Rebuild, &longer_lived);
    assert_eq!(Continuation::open(&ring, &sealed, &ME, REBUILD), Err(Forged));
}

proptest! {
    #[test]
    fn any_text_is_forged(text in "(v1\\.)?[A-Za-z0-9_-]{0,400}") {
        let ring = ring(&[1]);
        prop_assert_eq!(Cursor::open(&ring, &text, &ME), Err(Forged));
        prop_assert_eq!(Continuation::open(&ring, &text, &ME, REBUILD), Err(Forged));
    }

    /// What decodes is exactly what encodes.
    #[test]
    fn authentic_fields_are_canonical(fields in prop::collection::vec(any::<u8>(), 150..230), kind in 0_u8..4) {
        let ring = ring(&[1]);
        let mut fields = fields;
        let bindings = octets(&cursor_at(end(1)).seal(&ring))[HEADER_OCTETS + 72..HEADER_OCTETS + 136].to_vec();
        fields[72..136].copy_from_slice(&bindings);
        fields[136] = kind;
        // Positions small enough to be likely.
        fields[137..149].fill(0);
        fields[144] = 1;
        if let Some(high) = fields.get_mut(153) {
            *high = 0;
        }
        for length in 144..=fields.len() {
            let sealed = ring.seal(Kind::Incremental, &fields[..length]);
            if let Ok(cursor) = Cursor::open(&ring, &sealed, &ME) {
                prop_assert_eq!(cursor.seal(&ring), sealed);
            }
        }
    }
}

#[test]
fn keys_rotate_and_retire() {
    let old = tokens(&ring(&[1]));
    let opens = |ring: &KeyRing, token: &str| {
        Cursor::open(ring, token, &ME).is_ok() || Continuation::open(ring, token, &ME, REBUILD).is_ok()
    };
    let rotated = ring(&[2, 1]);
    let new = tokens(&rotated);
    assert!(old.iter().chain(&new).all(|token| opens(&rotated, token)));
    assert_ne!(old, new);
    let retired = ring(&[2]);
    assert!(new.iter().all(|token| opens(&retired, token)));
    for token in &old {
        assert_forged(&retired, token);
    }

    // A session's tokens repeat under its own key while that is in the ring.
    let first = KeyId::from_sql(1).expect("positive");
    assert_eq!(continuation().seal_with(&rotated, first).as_ref(), Ok(&old[3]));
    assert_eq!(cursor_at(end(0x20)).seal_with(&rotated, first).as_ref(), Ok(&old[2]));
    assert_eq!(continuation().seal_with(&retired, first), Err(UnknownKey));
    // The same id with another secret is another key.
    let impostor: KeyRing = format!("1:{}", URL_SAFE_NO_PAD.encode([9; 32])).parse().expect("a ring");
    for token in &old {
        assert_forged(&impostor, token);
    }
    // And so is the same secret under another id: what a token says of its key is authentic, too.
    let renamed: KeyRing = format!("2:{}", URL_SAFE_NO_PAD.encode([1; 32])).parse().expect("a ring");
    for token in &old {
        assert_forged(&renamed, token);
    }
}

#[test]
fn key_rings_are_parsed_strictly_and_shown_never() {
    let secret = URL_SAFE_NO_PAD.encode([0xfb; 32]);
    let parse = |text: &str| text.parse::<KeyRing>();
    assert_eq!(parse(&format!("7:{secret}\n")).map(|ring| ring.signing_key().to_sql()), Ok(7));
    assert!(parse(&format!("7:{secret}=,9223372036854775807:{secret}")).is_ok());
    for id in ["", "0", "-1", "+1", "01", "1.0", "a", "9223372036854775808", " 1"] {
        let text = format!("1:{secret},{id}:{secret}");
        assert_eq!(parse(&text).err(), Some(KeyRingError::Malformed { entry: 2 }), "{id:?}");
    }
    for text in ["", ",", "1", "secret"] {
        assert_eq!(parse(text).err(), Some(KeyRingError::Malformed { entry: 1 }), "{text:?}");
    }
    assert_eq!(parse(&format!("1:{secret},")).err(), Some(KeyRingError::Malformed { entry: 2 }));
    assert_eq!(parse(&format!("1:{secret},1:{secret}")).err(), Some(KeyRingError::RepeatedId { entry: 2 }));
    assert_eq!(parse(&format!("1:{}", &secret[..40])).err(), Some(KeyRingError::ShortSecret { entry: 1 }));
    let standard = secret.replace('-', "+").replace('_', "/");
    assert_ne!(standard, secret);
    let error = parse(&format!("1:{standard}")).expect_err("the other alphabet");
    assert_eq!(error, KeyRingError::NotBase64 { entry: 1 });
    assert!(!error.to_string().contains(&standard[..8]));
    let shown = format!("{:?}", parse(&format!("7:{secret}")).expect("a ring"));
    assert_eq!(shown, "KeyRing { signing: KeyId(7), keys: 1, .. }");
}

#[test]
fn each_cause_of_a_stale_cursor_is_told_apart() {
    let current = cursor::Current { lineage: lineage(), floor: end(0x10), boundary: end(0x30) };
    let staleness = |change: &dyn Fn(&mut Cursor)| {
        let mut cursor = cursor_at(effect(0x20, 0, 0));
        change(&mut cursor);
        cursor.staleness(&current)
    };
    let older_schema = |cursor: &mut Cursor| cursor.lineage.schema_hash = [0; 32];
    assert_eq!(staleness(&|_| {}), None);
    assert_eq!(staleness(&|c| c.position = end(0x10)), None, "at the floor");
    assert_eq!(staleness(&|c| c.position = end(0x30)), None, "at the boundary");
    assert_eq!(staleness(&older_schema), Some(Stale::Schema));
    let causes: [(&Change<Cursor>, Stale); 6] = [
        (&|c| c.lineage.stream_generation = Uuid::from_u128(8), Stale::Stream),
        (&|c| c.lineage.client_generation = 5, Stale::Client),
        (&|c| c.lineage.membership_generation = 1, Stale::Membership),
        (&|c| c.lineage.retention_generation = 4, Stale::Retention),
        (&|c| c.position = effect(0x10, 9, 9), Stale::BelowFloor),
        (&|c| c.position = effect(0x31, 0, 0), Stale::AheadOfBoundary),
    ];
    for (change, cause) in causes {
        assert_eq!(staleness(change), Some(cause));
        // Only a cursor of which nothing but the schema is old can be bridged.
        let both = |c: &mut Cursor| {
            change(c);
            older_schema(c);
        };
        assert_eq!(staleness(&both), Some(cause));
    }
    // Positions of another stream are not compared.
    let elsewhere = |c: &mut Cursor| {
        c.lineage.stream_generation = Uuid::from_u128(8);
        c.position = end(0x99);
    };
    assert_eq!(staleness(&elsewhere), Some(Stale::Stream));
}

#[test]
fn the_schema_bridge_keeps_the_position_and_every_other_binding() {
    let cursor = cursor_at(end(0x20));
    let bridged = cursor.with_schema([1; 32], 5);
    let lineage = Lineage { schema_hash: [1; 32], ..cursor.lineage };
    assert_eq!(bridged, Cursor { lineage, issued_at: 5, ..cursor });
}

#[test]
fn each_cause_of_a_lapsed_session_is_told_apart() {
    let now = continuation().issued_at + SESSION_MICROS - 1;
    let current = continuation::Current { lineage: lineage(), accepted_write_epoch: 6, now };
    let refusal = |change: &dyn Fn(&mut continuation::Current), limit| {
        let mut changed = current;
        change(&mut changed);
        continuation().refusal(&changed, limit)
    };
    assert_eq!(refusal(&|_| {}, 500), None, "the last microsecond of the session");
    assert_eq!(refusal(&|_| {}, 499), Some(Refusal::PageLimit));
    let causes: [(&Change<continuation::Current>, Lapse); 7] = [
        (&|c| c.now += 1, Lapse::Expired),
        (&|c| c.lineage.stream_generation = Uuid::from_u128(8), Lapse::Stream),
        (&|c| c.lineage.client_generation = 5, Lapse::Client),
        (&|c| c.lineage.schema_hash = [0; 32], Lapse::Schema),
        (&|c| c.lineage.membership_generation = 1, Lapse::Membership),
        (&|c| c.lineage.retention_generation = 4, Lapse::Retention),
        (&|c| c.accepted_write_epoch = 7, Lapse::Epoch),
    ];
    for (change, cause) in causes {
        assert_eq!(refusal(change, 500), Some(Refusal::Lapsed(cause)));
        assert_eq!(refusal(change, 499), Some(Refusal::Lapsed(cause)), "a lapsed session is told first");
    }
}

#[test]
fn no_token_is_longer_than_the_bound() {
    for token in tokens(&ring(&[1])) {
        assert!(token.len() <= MAX_CHARS, "{} {MAX_CHARS}", token.len());
        assert!(!token.contains("templates") && !token.contains("user-1"));
    }
}
