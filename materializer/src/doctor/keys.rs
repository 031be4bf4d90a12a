//! The pullers' key ring: whether it can be read, and whether what it sealed is still open.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use tributary_shared::store::{doctor, session};
use tributary_shared::token::{KeyId, KeyRing};

use super::{Report, State};

/// A ring is a few keys; a larger file is something else.
const RING_OCTETS: u64 = 64 * 1024;
/// Permissions of others than the owner and the group.
const OTHERS: u32 = 0o007;

/// Reads the ring.
pub fn examine(path: Option<&Path>, report: &mut Report) -> Option<KeyRing> {
    let path = path?;
    let name = path.display();
    let told = || "give the file whose text is the pullers' TRIBUTARY_TOKEN_KEYS, readable for this user";
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) => {
            report.unknown("keys", "not_examined", format!("the key ring {name} cannot be read: {error}"), told());
            return None;
        }
    };
    if metadata.len() > RING_OCTETS {
        report.problem("keys", "key_ring_invalid", format!("{name} is too large for a key ring"), told());
        return None;
    }
    if metadata.permissions().mode() & OTHERS != 0 {
        let what = format!("the key ring {name} may be used by everybody on this machine");
        report.problem(
            "keys",
            "key_ring_exposed",
            what,
            format!("chmod o= {name}; rotate the keys if others log in here"),
        );
    }
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) => {
            report.unknown("keys", "not_examined", format!("the key ring {name} cannot be read: {error}"), told());
            return None;
        }
    };
    match text.parse::<KeyRing>() {
        Ok(ring) => {
            let what = format!("the key ring has {} keys; {} signs", ring.len(), ring.signing_key().to_sql());
            report.good("keys", "key_ring", what);
            Some(ring)
        }
        // The error names the entry and never a secret.
        Err(error) => {
            let todo = "write the ring with deploy/k8s/key-ring.sh; a puller does not start with this one";
            report.problem("keys", "key_ring_invalid", format!("{name}: {error}"), todo);
            None
        }
    }
}

/// Compares it with the sessions that depend on keys.
pub async fn in_use(state: &State, ring: &KeyRing, report: &mut Report) {
    if !state.migrated {
        return;
    }
    let used = async {
        let db = session::acquire(&state.pool).await?;
        doctor::keys_in_use(&db).await
    }
    .await;
    for (key_id, sessions) in report.note("keys", used).into_iter().flatten() {
        if !KeyId::from_sql(key_id).is_some_and(|key_id| ring.has(key_id)) {
            let what =
                format!("{sessions} open rebuilds depend on key {key_id}, which the ring lacks: they start over");
            let todo = format!(
                "put key {key_id} back into the ring, last, for 24 hours and for as long as clients may stay away"
            );
            report.problem("keys", "key_missing", what, todo);
        }
    }
}
