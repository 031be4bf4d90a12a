//! Replays the fuzz corpus on stable, with the laws that the fuzz targets assert (`fuzz/fuzz_targets`).

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use tributary_shared::continuation::Continuation;
use tributary_shared::cursor::Cursor;
use tributary_shared::protocol::Envelope;
use tributary_shared::token::{Expected, KeyRing, Kind};
use uuid::Uuid;

fn corpus(target: &str) -> BTreeMap<String, Vec<u8>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let entries = fs::read_dir(directory).expect("a corpus").map(|entry| entry.expect("an entry"));
    entries.map(|e| (e.file_name().into_string().expect("UTF-8"), fs::read(e.path()).expect("a file"))).collect()
}

#[test]
fn tokens_of_the_corpus_are_canonical_or_forged() {
    let ring: KeyRing = "1:AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE".parse().expect("a ring");
    let me = Expected { user: "user-1", client: "client-1", scope: "templates_public" };
    let rebuild_id = Uuid::from_u128(0x0197_e83a_f7e8_7e21_92c0_c621_732b_d5de);
    let mut opened = Vec::new();
    for (name, data) in corpus("token") {
        let presented = std::str::from_utf8(&data).ok().map(str::to_owned);
        let sealed = [Kind::Incremental, Kind::Rebuild].map(|kind| ring.seal(kind, &data));
        for text in presented.into_iter().chain(sealed) {
            if let Ok(cursor) = Cursor::open(&ring, &text, &me) {
                assert_eq!(cursor.seal(&ring), text, "{name}");
                opened.push(name.clone());
            }
            if let Ok(continuation) = Continuation::open(&ring, &text, &me, rebuild_id) {
                assert_eq!(continuation.seal_with(&ring, ring.signing_key()).as_ref(), Ok(&text), "{name}");
                opened.push(name.clone());
            }
        }
    }
    assert_eq!(opened, ["incremental.txt", "incremental_fields.bin", "rebuild.txt", "rebuild_fields.bin"]);
}

#[test]
fn requests_of_the_corpus_are_valid_or_refused() {
    let mut valid = Vec::new();
    for (name, data) in corpus("request") {
        let Ok(envelope) = Envelope::read(&data) else { continue };
        let readings = [
            envelope.clone().pull().map(|request| request.client_id).ok(),
            envelope.clone().rebuild().map(|request| request.client_id).ok(),
            envelope.clone().connect().map(|request| request.client_id).ok(),
        ];
        for client in readings.into_iter().flatten() {
            assert_eq!(Some(client), envelope.client_id(), "{name}");
            valid.push(name.clone());
        }
    }
    assert_eq!(valid, ["connect.json", "connect_fresh.json", "pull.json", "rebuild.json"]);
}
