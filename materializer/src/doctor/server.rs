//! The servers: versions and settings, what the roles may do, publication and slot, the state's indexes, clocks.

use std::time::{Duration, SystemTime};

use tokio_postgres::Client;
use tributary_shared::lsn::Lsn;
use tributary_shared::registry::Registry;
use tributary_shared::store::doctor::{self, Settings};
use tributary_shared::store::error::StoreError;
use tributary_shared::store::session::{self, Address};
use tributary_shared::store::source::{self, Server, Slot};

use super::{Report, State};
use crate::diagnosis::{self, Names};
use crate::settings::DoctorSettings;

/// The oldest that is supported, PostgreSQL 14.
const OLDEST: i32 = 140_000;
/// A sender timeout below this ends streams that are merely slow.
const SENDER_TIMEOUT: Duration = Duration::from_secs(10);
/// Less than this is written in a busy minute.
const SLOT_LIMIT_OCTETS: u64 = 1 << 30;
/// PostgreSQL's own default; below it, transactions of a few ten thousand rows are decoded on disk.
const DECODING_OCTETS: u64 = 64 << 20;
/// Part of the slot's limit past which its WAL is at risk, as the alert has it.
const AT_RISK: f64 = 0.5;
/// Clocks differ by less than this where they are kept.
const SKEW: Duration = Duration::from_secs(5);

/// The source's version, settings, and what its role may do there.
pub async fn source(db: &Client, settings: &DoctorSettings, report: &mut Report) {
    let user = settings.databases.source_url.user();
    let found = async {
        let slot = source::slot(db, settings.names.slot.as_str()).await?;
        Ok((source::server(db).await?, doctor::settings(db).await?, slot))
    };
    let Some((server, found, slot)) = report.note("source", found.await) else { return };
    version("source", &server, report);
    if server.wal_level != "logical" {
        let todo = "set wal_level = logical (a managed service has a switch for it) and restart the server";
        report.problem(
            "source",
            "wal_level",
            format!("wal_level is {}: nothing can be decoded", server.wal_level),
            todo,
        );
    }
    capacity(&server, slot.as_ref(), report);
    source_settings(&found, report);
    if server.can_replicate {
        report.good("privileges", "replication", format!("role {user} may replicate"));
    } else {
        let what = format!("role {user} may not replicate");
        let todo = "ALTER ROLE … REPLICATION, or the managed service's role for it (deploy/sql/roles.sql)";
        report.problem("privileges", "no_replication", what, todo);
    }
    if !server.can_create {
        let what = format!("role {user} may not create objects in the source database");
        report.problem("privileges", "no_create", what, "GRANT CREATE ON DATABASE … (deploy/sql/roles.sql)");
    }
    if found.superuser {
        let what = format!("role {user} is a superuser: whoever gets its password owns the server");
        report.advice("privileges", "superuser", what, "make roles with only what each needs: deploy/sql/roles.sql");
    }
}

/// What start-up insists on, of either server.
fn version(area: &'static str, server: &Server, report: &mut Report) {
    if server.version < OLDEST {
        let what = format!("the {area} server runs PostgreSQL {}", server.version / 10_000);
        report.problem(area, "version", what, "PostgreSQL 14 or later is needed: upgrade the server");
    } else {
        let (major, minor) = (server.version / 10_000, server.version % 10_000);
        report.good(area, "version", format!("PostgreSQL {major}.{minor}"));
    }
    if server.in_recovery {
        let what = format!("the {area} server is a standby in recovery");
        report.problem(area, "in_recovery", what, format!("point --{area}-url at the primary"));
    }
}

/// Slots and senders; each materializer needs one sender, and a baseline another.
fn capacity(server: &Server, slot: Option<&Slot>, report: &mut Report) {
    let (used, limit) = (server.slots.0, i64::from(server.slots.1));
    let todo = "raise max_replication_slots and restart the server, or drop a slot that nobody needs (pg_drop_replication_slot)";
    if slot.is_none() && used >= limit {
        report.problem("source", "slots_exhausted", format!("all {limit} replication slots are in use"), todo);
    } else {
        report.good("source", "slots", format!("{used} of {limit} replication slots are in use"));
    }
    let (used, limit) = (server.wal_senders.0, i64::from(server.wal_senders.1));
    let active = slot.is_some_and(|slot| slot.active_pid.is_some());
    if used >= limit {
        let what = format!("all {limit} WAL senders are in use");
        let todo = "raise max_wal_senders and restart the server";
        // One of them is ours while the slot is followed; a takeover still needs another for a moment.
        if active {
            report.advice("source", "wal_senders_exhausted", what, todo);
        } else {
            report.problem("source", "wal_senders_exhausted", what, todo);
        }
    } else {
        report.good("source", "wal_senders", format!("{used} of {limit} WAL senders are in use"));
    }
}

fn source_settings(settings: &Settings, report: &mut Report) {
    if settings.wal_sender_timeout.is_zero() {
        let what = "wal_sender_timeout is 0: the sender of a materializer that vanished holds the slot for ever";
        report.advice("source", "wal_sender_timeout", what, "set wal_sender_timeout = 60s");
    } else if settings.wal_sender_timeout < SENDER_TIMEOUT {
        let what = format!(
            "wal_sender_timeout is {} ms: slow networks end the stream",
            settings.wal_sender_timeout.as_millis()
        );
        report.advice("source", "wal_sender_timeout", what, "set wal_sender_timeout = 60s");
    }
    match settings.slot_wal_limit_octets {
        None => {
            let what = "max_slot_wal_keep_size has no limit: a slot that nobody follows fills the source's disk";
            let todo = "set max_slot_wal_keep_size to what the disk can spare; it must outlast the longest time without a materializer (runbook sizing.md)";
            report.advice("source", "slot_unlimited", what, todo);
        }
        Some(limit) if limit < SLOT_LIMIT_OCTETS => {
            let what = format!(
                "max_slot_wal_keep_size is {} MiB: a short outage of the materializer loses the slot",
                limit >> 20
            );
            report.advice("source", "slot_limit_small", what, "raise max_slot_wal_keep_size (runbook sizing.md)");
        }
        Some(limit) => report.good("source", "slot_limit", format!("max_slot_wal_keep_size is {} MiB", limit >> 20)),
    }
    if settings.decoding_octets < DECODING_OCTETS {
        let what = format!(
            "logical_decoding_work_mem is {} KiB: ordinary transactions are decoded on disk",
            settings.decoding_octets >> 10
        );
        report.advice("source", "decoding_memory", what, "set logical_decoding_work_mem = 64MB or more");
    }
    if !settings.idle_slot_timeout.is_zero() {
        let what = format!(
            "idle_replication_slot_timeout is {} s: an outage of the materializer that is longer loses the slot",
            settings.idle_slot_timeout.as_secs()
        );
        report.advice(
            "source",
            "idle_slot_timeout",
            what,
            "set idle_replication_slot_timeout = 0, and limit the slot by max_slot_wal_keep_size",
        );
    }
}

/// The publication, and the slot with the WAL that it keeps, as the stream would find them.
pub async fn publication_and_slot(
    db: &Client,
    address: &Address,
    settings: &DoctorSettings,
    state: Option<&State>,
    configured: Option<&Registry>,
    report: &mut Report,
) {
    let names = Names { slot: settings.names.slot.as_str(), publication: &settings.names.publication };
    let in_force = state.and_then(|state| state.registry.as_ref());
    let Some(registry) = in_force.or(configured) else { return };
    publication(db, names, registry, in_force.is_some(), report).await;
    let Some((state, in_force)) = state.zip(in_force) else { return };
    let examined = async {
        let state = session::acquire(&state.pool).await?;
        diagnosis::examine(db, address, &state, names, &in_force.tables).await
    };
    let Some(found) = report.note("slot", examined.await) else { return };
    for fault in &found.faults {
        report.problem("slot", fault.code(), fault.to_string(), fault.advice());
    }
    if let Some(slot) = &found.slot {
        wal_at_risk(names.slot, slot, found.present.wal, report);
    }
}

fn wal_at_risk(name: &str, slot: &Slot, wal: Lsn, report: &mut Report) {
    let retained = if slot.restart == Lsn::ZERO { 0 } else { wal.since(slot.restart) };
    let what = format!("slot {name} keeps {} MiB of WAL", retained >> 20);
    let safe = slot.safe_wal_octets.map(|safe| safe.max(0).unsigned_abs());
    let full = safe.is_some_and(|safe| retained as f64 > AT_RISK * (retained + safe) as f64);
    if slot.wal_status.as_deref() == Some("unreserved") || full {
        let left = safe.map_or_else(String::new, |safe| format!(", and is lost after {} MiB more", safe >> 20));
        let todo = "let the materializer catch up, or raise max_slot_wal_keep_size now (runbook slot-retains-wal.md)";
        report.problem("slot", "wal_at_risk", format!("{what}{left}"), todo);
    } else if !slot.is_lost() {
        report.good("slot", "slot", what);
    }
    if slot.active_pid.is_none() && !slot.is_lost() {
        let todo = "start a materializer, or see why it does not follow: `materializer status`";
        report.problem(
            "slot",
            "slot_inactive",
            format!("nobody follows slot {name}: the source keeps WAL for it"),
            todo,
        );
    }
}

/// Whether the publication is as the stream needs it, and who can keep it so.
async fn publication(db: &Client, names: Names<'_>, registry: &Registry, streaming: bool, report: &mut Report) {
    let name = names.publication;
    let relations: Vec<_> = registry.tables.iter().map(|table| table.relation.clone()).collect();
    let found = async {
        let difference = source::publication_difference(db, name, &registry.tables).await?;
        let owner = doctor::owns_publication(db, name).await?;
        let access = doctor::access(db, &relations).await?;
        Ok((difference, owner, access.into_iter().find(|access| !access.owned)))
    };
    let Some((difference, owner, stranger)) = report.note("publication", found.await) else { return };
    // One that exists is altered by its owner, and tables are published by theirs.
    let keeps = owner.unwrap_or(true) && stranger.is_none();
    match difference {
        None if keeps => report.good(
            "publication",
            "publication",
            format!("publication {name} is as the stream needs it, and this role keeps it"),
        ),
        None => report.good(
            "publication",
            "publication",
            format!("publication {name} is as the stream needs it; an administrator keeps it"),
        ),
        // While a stream is followed, the slot's findings say it.
        Some(_) if streaming && keeps => {}
        Some(difference) if keeps => {
            report.good(
                "publication",
                "publication",
                format!("publication {name} will be made by the materializer: {difference}"),
            );
        }
        Some(difference) => {
            let whose = stranger.map_or_else(|| "it".to_owned(), |access| access.relation.to_string());
            let what = format!("publication {name}: {difference}, and this role does not own {whose}");
            let todo = "let the tables' owner run deploy/sql/roles.sql with -v publish, or make this role a member of the owner (-v owner)";
            report.problem("publication", "publication_not_ours", what, todo);
        }
    }
}

/// The state's server, and what its role may do there.
pub async fn state(state: &State, settings: &DoctorSettings, report: &mut Report) {
    let user = settings.databases.state().user();
    let db = match session::acquire(&state.pool).await {
        Ok(db) => db,
        Err(error) => {
            report.note::<()>("state", Err(error));
            return;
        }
    };
    let found = async { Ok((source::server(&db).await?, doctor::settings(&db).await?)) };
    if let Some((server, found)) = report.note("state", found.await) {
        version("state", &server, report);
        if server.encoding != "UTF8" {
            let what = format!("the state database has the encoding {}", server.encoding);
            report.problem("state", "encoding", what, "make it anew with ENCODING 'UTF8'");
        }
        durability(&found, report);
        if !server.can_create {
            let what = format!("role {user} may not create objects in the state database");
            report.problem("privileges", "state_no_create", what, "GRANT CREATE ON DATABASE … (deploy/sql/roles.sql)");
        }
    }
    let clock = clock(&db, "state", settings.clock_offset_seconds, report).await;
    report.note("clock", clock);
    if !state.migrated {
        report.advice(
            "state",
            "no_state",
            "the state database holds no state yet",
            "start a materializer: `materializer run`",
        );
        return;
    }
    let refusals = doctor::state_refusals(&db).await;
    if let Some(refusals) = report.note("privileges", refusals) {
        if refusals.is_empty() {
            report.good("privileges", "state_schema", format!("role {user} may write the state"));
        } else {
            let what = format!("role {user} may not {}", refusals.join(", "));
            let todo =
                "run deploy/sql/roles.sql and the migrations as the role that owns the state (ALTER TABLE … OWNER TO)";
            report.problem("privileges", "state_not_writable", what, todo);
        }
    }
    let Some(registry) = &state.registry else { return };
    let missing = doctor::missing_indexes(&db, &registry.tables).await;
    if let Some(missing) = report.note("indexes", missing) {
        if missing.is_empty() {
            report.good("indexes", "indexes", "every column that rules look up by has its index");
        } else {
            let what = format!("rules look up by columns without a valid index: {}", missing.join(", "));
            let todo = "run `materializer reset`, or make the index by hand on the projection (CREATE INDEX CONCURRENTLY … ON tributary_data.…)";
            report.problem("indexes", "index_missing", what, todo);
        }
    }
}

/// What is acknowledged to the source must be on the state's disk.
fn durability(settings: &Settings, report: &mut Report) {
    if !settings.waits_for_disk {
        let what = "synchronous_commit is off at the state: what is acknowledged to the source may be lost in a crash";
        let todo = "ALTER ROLE … SET synchronous_commit = on for the materializer's role at the state";
        report.problem("state", "not_durable", what, todo);
    }
    if !settings.fsync || !settings.full_page_writes {
        let what = "fsync or full_page_writes is off at the state: a crash of its machine can break it";
        report.advice("state", "no_fsync", what, "set fsync = on and full_page_writes = on; reset after such a crash");
    }
}

/// Compares a server's clock with this machine's; the question's own time is allowed for.
pub async fn clock(
    db: &Client,
    area: &'static str,
    offset_seconds: i64,
    report: &mut Report,
) -> Result<(), StoreError> {
    let asked = SystemTime::now();
    let there = doctor::clock(db).await?;
    let took = asked.elapsed().unwrap_or_default();
    let shift = Duration::from_secs(offset_seconds.unsigned_abs());
    let middle = asked + took / 2;
    let here = if offset_seconds < 0 { middle - shift } else { middle + shift };
    let skew = there.duration_since(here).unwrap_or_else(|error| error.duration());
    if skew > SKEW + took / 2 {
        let what = format!("the clocks of this machine and of the {area} server differ by {} s", skew.as_secs());
        let todo = "keep the clocks by NTP on both: leases, expiries and lag are told by them";
        report.problem("clock", "clock_skew", what, todo);
    } else {
        report.good(
            "clock",
            "clock",
            format!("this machine and the {area} server agree within {} ms", (skew + took).as_millis()),
        );
    }
    Ok(())
}
