//! `materializer status`: how the stream is, what happened to it, what to do. Reads both databases, writes nothing, and
//! needs no running materializer. Never prints row values, keys, tokens, or ids of users, clients and scopes.

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use serde::Serialize;
use tokio_postgres::Client;
use tributary_shared::lsn::Lsn;
use tributary_shared::store::configuration::{self, Configuration};
use tributary_shared::store::progress::{self, Progress};
use tributary_shared::store::status::{self, Leader, OpenCase, Reset};
use tributary_shared::store::{migrate, session};

use crate::diagnosis::{self, Found, Names};
use crate::settings::StatusSettings;

/// Exit code of a stream that needs somebody.
const ATTENTION: u8 = 3;
/// A leader gives a sign of life several times in this time, whatever its lease.
const SILENCE: Duration = Duration::from_secs(30);
/// Octets of WAL behind the source past which the stream is called behind.
const BEHIND: u64 = 64 << 20;

/// All of it, as `--json` prints it.
#[derive(Debug, Serialize)]
struct Status {
    /// One word: `following`, `behind`, `resetting`, `stopped`, `broken`, `leaderless`, `empty`, `unreachable`.
    condition: &'static str,
    /// What happened and what to do, the worst first; empty when there is nothing to do.
    findings: Vec<Finding>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream: Option<StreamStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    source: Option<SourceStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    slot: Option<SlotStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lag: Option<Lag>,
    #[serde(skip_serializing_if = "Option::is_none")]
    leader: Option<LeaderStatus>,
    quarantine: Vec<CaseStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reset: Option<ResetStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    configuration: Option<ConfigurationStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    clients: Option<ClientsStatus>,
}

#[derive(Debug, Serialize)]
struct Finding {
    code: String,
    what: String,
    todo: String,
    /// The stream does not go on by itself.
    stops: bool,
}

#[derive(Debug, Serialize)]
struct StreamStatus {
    generation: String,
    boundary_lsn: String,
    resume_lsn: String,
    commit_age_seconds: u64,
    materialized_age_seconds: u64,
}

#[derive(Debug, Serialize)]
struct SourceStatus {
    system_identifier: String,
    timeline: i64,
    wal_lsn: String,
}

#[derive(Debug, Serialize)]
struct SlotStatus {
    name: String,
    exists: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    facts: Option<SlotFacts>,
}

#[derive(Debug, Serialize)]
struct SlotFacts {
    active: bool,
    confirmed_flush_lsn: String,
    restart_lsn: String,
    wal_status: String,
    /// WAL that the source keeps because of the slot.
    retained_octets: u64,
    /// WAL that may be written before the slot is in danger.
    #[serde(skip_serializing_if = "Option::is_none")]
    safe_octets: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    invalidation_reason: Option<String>,
}

#[derive(Debug, Serialize)]
struct Lag {
    /// WAL between what is acknowledged and the source's end; other databases' WAL counts.
    octets: u64,
}

#[derive(Debug, Serialize)]
struct LeaderStatus {
    epoch: i64,
    alive: bool,
    silence_seconds: u64,
    materializers: i64,
    acknowledged_lsn: String,
}

#[derive(Debug, Serialize)]
struct CaseStatus {
    number: i64,
    commit_lsn: String,
    reason: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    relation: Option<String>,
    detail: String,
    age_seconds: u64,
}

#[derive(Debug, Serialize)]
struct ResetStatus {
    number: i64,
    requested_age_seconds: u64,
    completed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    completed_age_seconds: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    generation: Option<String>,
}

#[derive(Debug, Serialize)]
struct ConfigurationStatus {
    number: i64,
    schema_version: u64,
    tables: usize,
    rules: usize,
}

#[derive(Debug, Serialize)]
struct ClientsStatus {
    registered: i64,
    expired: i64,
}

/// Reads and prints it.
#[expect(clippy::print_stdout, reason = "the status is the program's output")]
pub async fn print(settings: StatusSettings) -> anyhow::Result<ExitCode> {
    let status = read(&settings).await?;
    if settings.json {
        println!("{}", serde_json::to_string_pretty(&status)?);
    } else {
        print!("{}", table(&status));
    }
    let attention = status.findings.iter().any(|finding| finding.stops);
    Ok(if attention { ExitCode::from(ATTENTION) } else { ExitCode::SUCCESS })
}

async fn read(settings: &StatusSettings) -> anyhow::Result<Status> {
    let address = settings.databases.state();
    let pool = session::pool(address, "tributary-status", 1, Duration::from_secs(10))?;
    let mut status = Status::empty();
    let db = match session::acquire(&pool).await {
        Ok(db) => db,
        Err(error) => {
            status.find(
                "state_unreachable",
                format!("the state database at {address} cannot be read: {error}"),
                "is PostgreSQL running there, and are role and password right? Clients get 503 until it is back",
                true,
            );
            status.condition = "unreachable";
            return Ok(status);
        }
    };
    if !migrate::is_migrated(&db).await? {
        status.find(
            "no_state",
            "the state database holds no state".into(),
            "start a materializer: `materializer run`",
            true,
        );
        return Ok(status);
    }
    let progress = progress::load(&db).await?;
    let leader = status::leader(&db).await?;
    let cases = status::quarantine(&db).await?;
    let reset = status::reset(&db).await?;
    let (registered, expired) = status::clients(&db).await?;
    status.clients = Some(ClientsStatus { registered, expired });
    let configuration = match &progress {
        Some(progress) => Some(configuration::load(&db, progress.configuration_no).await?),
        None => None,
    };
    let found = match (&progress, &configuration) {
        (Some(_), Some(configuration)) => {
            let source = &settings.databases.source_url;
            let names = Names { slot: settings.names.slot.as_str(), publication: &settings.names.publication };
            let tables = &configuration.registry.tables;
            let examined = async {
                let client: Client = source.connect("tributary-status").await?;
                diagnosis::examine(&client, source, &db, names, tables).await
            };
            match tokio::time::timeout(SILENCE, examined).await {
                Ok(Ok(found)) => Some(found),
                Ok(Err(error)) => {
                    status.source_unreachable(&format!("the source database at {source} cannot be read: {error}"));
                    None
                }
                Err(_) => {
                    status.source_unreachable(&format!("the source database at {source} does not answer"));
                    None
                }
            }
        }
        _ => None,
    };
    let now = SystemTime::now();
    status.add_state(now, progress.as_ref(), configuration.as_ref(), leader.as_ref());
    status.add_cases(now, &cases);
    status.add_reset(now, reset.as_ref());
    if let Some(found) = &found {
        status.add_source(settings.names.slot.as_str(), found);
    }
    status.conclude(progress.is_some());
    Ok(status)
}

impl Status {
    fn empty() -> Self {
        Self {
            condition: "empty",
            findings: Vec::new(),
            stream: None,
            source: None,
            slot: None,
            lag: None,
            leader: None,
            quarantine: Vec::new(),
            reset: None,
            configuration: None,
            clients: None,
        }
    }

    fn find(&mut self, code: &str, what: String, todo: &str, stops: bool) {
        self.findings.push(Finding { code: code.to_owned(), what, todo: todo.to_owned(), stops });
    }

    fn source_unreachable(&mut self, what: &str) {
        let todo = "is PostgreSQL running there, and are role and password right? The stream goes on when it is back; clients are served meanwhile";
        self.find("source_unreachable", what.to_owned(), todo, true);
    }

    fn add_state(
        &mut self,
        now: SystemTime,
        progress: Option<&Progress>,
        configuration: Option<&Configuration>,
        leader: Option<&Leader>,
    ) {
        self.stream = progress.map(|progress| StreamStatus {
            generation: progress.stream_generation.to_string(),
            boundary_lsn: progress.boundary_lsn.to_string(),
            resume_lsn: progress.resume_lsn.to_string(),
            commit_age_seconds: age(now, progress.commit_time),
            materialized_age_seconds: age(now, progress.materialized_at),
        });
        self.configuration = configuration.map(|configuration| ConfigurationStatus {
            number: configuration.configuration_no,
            schema_version: configuration.schema_version,
            tables: configuration.registry.tables.len(),
            rules: configuration.registry.rules.len(),
        });
        self.leader = leader.map(|leader| LeaderStatus {
            epoch: leader.epoch,
            alive: leader.silence < SILENCE,
            silence_seconds: leader.silence.as_secs(),
            materializers: leader.materializers,
            acknowledged_lsn: leader.acknowledged.to_string(),
        });
        if !self.leader.as_ref().is_some_and(|leader| leader.alive) {
            let what = match &self.leader {
                Some(leader) if leader.materializers > 0 => "no materializer leads at this moment",
                _ => "no materializer runs: nothing is materialized, and the source keeps WAL for the slot",
            };
            self.find("no_leader", what.into(), "start a materializer: `materializer run`", true);
        }
    }

    fn add_cases(&mut self, now: SystemTime, cases: &[OpenCase]) {
        for case in cases {
            let place = case.relation.as_ref().map(|relation| format!(" ({relation})")).unwrap_or_default();
            let what = format!(
                "the stream is stopped before the transaction at {}: {}{place}: {}",
                case.commit_lsn, case.reason, case.detail
            );
            let todo = if case.reason == "drift" {
                "bring the table or the configuration back in line and run `materializer retry`, or run `materializer reset`: a new baseline is taken and every client rebuilds once"
            } else {
                "mend the cause (for instance map the column to `string` in the configuration) and run `materializer retry`, or mend the row and run `materializer reset`: a new baseline is taken and every client rebuilds once"
            };
            self.find(&format!("quarantine_{}", case.reason), what, todo, true);
            self.quarantine.push(CaseStatus {
                number: case.quarantine_no,
                commit_lsn: case.commit_lsn.to_string(),
                reason: case.reason.clone(),
                relation: case.relation.clone(),
                detail: case.detail.clone(),
                age_seconds: age(now, case.created_at),
            });
        }
    }

    fn add_reset(&mut self, now: SystemTime, reset: Option<&Reset>) {
        let Some(reset) = reset else { return };
        if reset.completed_at.is_none() {
            let what = format!("reset {} is requested and not yet active", reset.reset_no);
            self.find("resetting", what, "wait: the former state is served until the new baseline is active", false);
        }
        self.reset = Some(ResetStatus {
            number: reset.reset_no,
            requested_age_seconds: age(now, reset.requested_at),
            completed: reset.completed_at.is_some(),
            completed_age_seconds: reset.completed_at.map(|at| age(now, at)),
            generation: reset.stream_generation.map(|generation| generation.to_string()),
        });
    }

    fn add_source(&mut self, slot_name: &str, found: &Found) {
        let wal = found.present.wal;
        // While a reset is carried out the slot is the next generation's already.
        let resetting = self.reset.as_ref().is_some_and(|reset| !reset.completed);
        for fault in &found.faults {
            self.find(fault.code(), fault.to_string(), fault.advice(), !resetting);
        }
        self.source = Some(SourceStatus {
            system_identifier: found.present.system_identifier.clone(),
            timeline: found.present.timeline,
            wal_lsn: wal.to_string(),
        });
        let slot = found.slot.as_ref();
        if let Some(slot) = slot
            && slot.wal_status.as_deref() == Some("unreserved")
        {
            self.find(
                "slot_in_danger",
                "the source is about to remove WAL that the slot needs".into(),
                "let the materializer catch up, or raise max_slot_wal_keep_size now",
                true,
            );
        }
        self.lag = slot.map(|slot| Lag { octets: wal.since(slot.confirmed_flush) });
        self.slot = Some(SlotStatus {
            name: slot_name.to_owned(),
            exists: slot.is_some(),
            facts: slot.map(|slot| SlotFacts {
                active: slot.active_pid.is_some(),
                confirmed_flush_lsn: slot.confirmed_flush.to_string(),
                restart_lsn: slot.restart.to_string(),
                wal_status: slot.wal_status.clone().unwrap_or_else(|| "unknown".into()),
                retained_octets: if slot.restart == Lsn::ZERO { 0 } else { wal.since(slot.restart) },
                safe_octets: slot.safe_wal_octets,
                invalidation_reason: slot.invalidation_reason.clone(),
            }),
        });
    }

    /// One word for all of it, and the worst finding first.
    fn conclude(&mut self, has_progress: bool) {
        let found = |code: &str| self.findings.iter().any(|finding| finding.code.starts_with(code));
        let resetting = self.reset.as_ref().is_some_and(|reset| !reset.completed);
        self.condition = if !has_progress {
            "empty"
        } else if resetting {
            "resetting"
        } else if found("source_unreachable") {
            "unreachable"
        } else if self.findings.iter().any(|f| {
            f.stops && f.code != "no_leader" && f.code != "slot_in_danger" && !f.code.starts_with("quarantine_")
        }) {
            "broken"
        } else if found("quarantine_") {
            "stopped"
        } else if found("no_leader") {
            "leaderless"
        } else if self.lag.as_ref().is_some_and(|lag| lag.octets > BEHIND) {
            "behind"
        } else {
            "following"
        };
        // Why the stream cannot go on stands before who could carry it on.
        self.findings.sort_by_key(|finding| (!finding.stops, finding.code == "no_leader"));
    }
}

fn age(now: SystemTime, then: SystemTime) -> u64 {
    now.duration_since(then).unwrap_or_default().as_secs()
}

/// The table for people.
fn table(status: &Status) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "{name:<14}{value}");
    };
    line("condition", status.condition.to_owned());
    if let Some(stream) = &status.stream {
        line("generation", stream.generation.clone());
        line(
            "progress",
            format!(
                "boundary {}, resumes at {}, last moved {} s ago",
                stream.boundary_lsn, stream.resume_lsn, stream.materialized_age_seconds
            ),
        );
    }
    if let Some(source) = &status.source {
        line("source", format!("WAL {}, timeline {}", source.wal_lsn, source.timeline));
    }
    if let Some(slot) = &status.slot {
        line(
            "slot",
            match &slot.facts {
                None => format!("{}: does not exist", slot.name),
                Some(facts) => format!(
                    "{}: {}, confirmed {}, WAL {}, keeps {}{}",
                    slot.name,
                    if facts.active { "active" } else { "not active" },
                    facts.confirmed_flush_lsn,
                    facts.wal_status,
                    octets(facts.retained_octets),
                    facts
                        .safe_octets
                        .map(|safe| format!(", {} until it is in danger", octets(safe.max(0) as u64)))
                        .unwrap_or_default(),
                ),
            },
        );
    }
    if let Some(lag) = &status.lag {
        line("lag", format!("{} behind the source's WAL", octets(lag.octets)));
    }
    if let Some(leader) = &status.leader {
        let sign = if leader.alive { format!("alive, {} s ago", leader.silence_seconds) } else { "none".to_owned() };
        line("leader", format!("{sign}; epoch {}, {} materializers connected", leader.epoch, leader.materializers));
    }
    if let Some(reset) = &status.reset {
        let state = match reset.completed_age_seconds {
            Some(age) => format!("active since {age} s"),
            None => format!("requested {} s ago", reset.requested_age_seconds),
        };
        line("reset", format!("number {}, {state}", reset.number));
    }
    if let Some(configuration) = &status.configuration {
        line(
            "configuration",
            format!(
                "number {}, schema version {}, {} tables, {} rules",
                configuration.number, configuration.schema_version, configuration.tables, configuration.rules
            ),
        );
    }
    if let Some(clients) = &status.clients {
        line("clients", format!("{} registered, {} expired", clients.registered, clients.expired));
    }
    for finding in &status.findings {
        let _ = write!(text, "\n{}: {}\n  what to do: {}\n", finding.code, finding.what, finding.todo);
    }
    text
}

fn octets(count: u64) -> String {
    const MIB: u64 = 1 << 20;
    match count {
        0..1024 => format!("{count} B"),
        1024..MIB => format!("{} KiB", count / 1024),
        _ => format!("{} MiB", count / MIB),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_condition_names_the_worst() {
        let mut status = Status::empty();
        status.find("no_leader", String::new(), "", true);
        status.conclude(true);
        assert_eq!(status.condition, "leaderless");
        status.find("quarantine_poison", String::new(), "", true);
        status.conclude(true);
        assert_eq!(status.condition, "stopped");
        status.find("slot_vanished", String::new(), "", true);
        status.conclude(true);
        assert_eq!(status.condition, "broken");
        assert_eq!(status.findings.last().map(|finding| finding.code.as_str()), Some("no_leader"));
        let mut clean = Status::empty();
        clean.conclude(true);
        assert_eq!((clean.condition, table(&clean)), ("following", "condition     following\n".to_owned()));
    }
}
