//! `materializer doctor`: everything that can be wrong around Tributary, each with its remedy. Reads both databases, the
//! configuration and the key ring, changes nothing, and needs no running materializer. What stops the stream right now
//! is `status`'s; both ask [`crate::diagnosis`]. Never prints row values, keys, tokens, or ids of users, clients, scopes.

mod keys;
mod relations;
mod server;

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use serde::Serialize;
use tokio_postgres::Client;
use tributary_shared::registry::Registry;
use tributary_shared::store::error::StoreError;
use tributary_shared::store::session::{self, Address, Pool};
use tributary_shared::store::{configuration, migrate, progress};

use crate::preflight;
use crate::settings::DoctorSettings;

/// Exit code of problems.
const PROBLEMS: u8 = 1;
/// Exit code when something could not be examined, and nothing else is wrong.
const UNKNOWN: u8 = 2;
/// Time for one database; statements have less.
const PATIENCE: Duration = Duration::from_secs(60);
const STATEMENT_LIMIT: &str = "15000";

/// What a finding means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
enum Grade {
    /// It does not work, or will not.
    Problem,
    /// It could not be examined.
    Unknown,
    /// It works, and deserves a look.
    Advice,
    /// It is as it should be.
    Good,
}

#[derive(Debug, Serialize)]
struct Finding {
    /// A word for programs.
    code: String,
    /// What it is about: `source`, `state`, `privileges`, `publication`, `slot`, `configuration`, `relations`, `indexes`,
    /// `clock`, `keys`.
    area: &'static str,
    grade: Grade,
    what: String,
    /// The remedy; of all that is not good.
    #[serde(skip_serializing_if = "Option::is_none")]
    todo: Option<String>,
}

/// All of it, as `--json` prints it.
#[derive(Debug, Serialize)]
struct Report {
    /// `healthy`, `problems` or `unknown`.
    verdict: &'static str,
    findings: Vec<Finding>,
}

impl Report {
    fn add(&mut self, area: &'static str, code: &str, grade: Grade, what: String, todo: Option<String>) {
        self.findings.push(Finding { code: code.to_owned(), area, grade, what, todo });
    }

    fn problem(&mut self, area: &'static str, code: &str, what: impl Into<String>, todo: impl Into<String>) {
        self.add(area, code, Grade::Problem, what.into(), Some(todo.into()));
    }

    fn advice(&mut self, area: &'static str, code: &str, what: impl Into<String>, todo: impl Into<String>) {
        self.add(area, code, Grade::Advice, what.into(), Some(todo.into()));
    }

    fn good(&mut self, area: &'static str, code: &str, what: impl Into<String>) {
        self.add(area, code, Grade::Good, what.into(), None);
    }

    fn unknown(&mut self, area: &'static str, code: &str, what: impl Into<String>, todo: impl Into<String>) {
        self.add(area, code, Grade::Unknown, what.into(), Some(todo.into()));
    }

    /// A step that failed tells that its area is not known, and the others go on.
    fn note<T>(&mut self, area: &'static str, outcome: Result<T, StoreError>) -> Option<T> {
        match outcome {
            Ok(found) => Some(found),
            Err(error) => {
                let todo = "mend what the message says, or ask again: the other findings stand";
                self.unknown(area, "not_examined", format!("{area} could not be examined: {error}"), todo);
                None
            }
        }
    }

    /// The verdict, and the worst first.
    fn conclude(&mut self) -> ExitCode {
        self.findings.sort_by_key(|finding| finding.grade);
        let worst = self.findings.first().map(|finding| finding.grade);
        let (verdict, code) = match worst {
            Some(Grade::Problem) => ("problems", ExitCode::from(PROBLEMS)),
            Some(Grade::Unknown) => ("unknown", ExitCode::from(UNKNOWN)),
            _ => ("healthy", ExitCode::SUCCESS),
        };
        self.verdict = verdict;
        code
    }
}

/// What is known of the state beside its server.
struct State {
    pool: Pool,
    migrated: bool,
    /// The configuration in force; there is none before the first baseline.
    registry: Option<Registry>,
}

/// Examines, and prints what was found.
#[expect(clippy::print_stdout, reason = "the findings are the program's output")]
pub async fn print(settings: DoctorSettings) -> anyhow::Result<ExitCode> {
    let mut report = Report { verdict: "healthy", findings: Vec::new() };
    examine(&settings, &mut report).await;
    let code = report.conclude();
    if settings.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{}", table(&report));
    }
    Ok(code)
}

async fn examine(settings: &DoctorSettings, report: &mut Report) {
    let state_address = settings.databases.state().clone().with_setting("statement_timeout", STATEMENT_LIMIT);
    let source_address = settings.databases.source_url.clone().with_setting("statement_timeout", STATEMENT_LIMIT);
    let state = within(report, "state", &state_address, open_state(&state_address)).await;
    let source = within(report, "source", &source_address, source_address.connect("tributary-doctor")).await;
    let rings = keys::examine(settings.token_keys_file.as_deref(), report);
    let mut configured = None;
    if let Some(mut source) = source {
        let examined = async {
            server::source(&source, settings, report).await;
            configured = configuration(&mut source, settings, state.as_ref(), report).await;
            let registries = [configured.as_ref(), state.as_ref().and_then(|state| state.registry.as_ref())];
            relations::examine(&source, &registries, report).await;
            server::publication_and_slot(
                &source,
                &source_address,
                settings,
                state.as_ref(),
                configured.as_ref(),
                report,
            )
            .await;
            let clock = server::clock(&source, "source", settings.clock_offset_seconds, report).await;
            report.note("clock", clock);
        };
        if tokio::time::timeout(PATIENCE, examined).await.is_err() {
            unanswered(report, "source", &source_address);
        }
    }
    if let Some(state) = &state {
        let examined = async {
            server::state(state, settings, report).await;
            if let Some(ring) = &rings {
                keys::in_use(state, ring, report).await;
            }
        };
        if tokio::time::timeout(PATIENCE, examined).await.is_err() {
            unanswered(report, "state", &state_address);
        }
    }
}

/// Runs the first word with a database; one that cannot be reached leaves its areas unknown.
async fn within<T>(
    report: &mut Report,
    area: &'static str,
    address: &Address,
    work: impl Future<Output = Result<T, StoreError>>,
) -> Option<T> {
    match tokio::time::timeout(PATIENCE, work).await {
        Ok(Ok(done)) => Some(done),
        Ok(Err(error)) => {
            let todo = "is PostgreSQL running there, and are role and password right?";
            report.unknown(
                area,
                "unreachable",
                format!("the {area} database at {address} cannot be read: {error}"),
                todo,
            );
            None
        }
        Err(_) => {
            unanswered(report, area, address);
            None
        }
    }
}

fn unanswered(report: &mut Report, area: &'static str, address: &Address) {
    let what = format!("the {area} database at {address} does not answer");
    report.unknown(area, "unanswered", what, "is the server overloaded, or does a firewall drop its packets?");
}

async fn open_state(address: &Address) -> Result<State, StoreError> {
    let pool = session::pool(address, "tributary-doctor", 1, Duration::from_secs(10))?;
    let db = session::acquire(&pool).await?;
    let migrated = migrate::is_migrated(&db).await?;
    let registry = match if migrated { progress::load(&db).await? } else { None } {
        Some(progress) => Some(configuration::load(&db, progress.configuration_no).await?.registry),
        None => None,
    };
    drop(db);
    Ok(State { pool, migrated, registry })
}

/// The file's registry, when there is a file that resolves.
async fn configuration(
    source: &mut Client,
    settings: &DoctorSettings,
    state: Option<&State>,
    report: &mut Report,
) -> Option<Registry> {
    let in_force = state.and_then(|state| state.registry.as_ref());
    let Some(path) = &settings.config else {
        if in_force.is_none() {
            let what = "no configuration is in force yet, and none was given: relations were not examined";
            report.advice("configuration", "no_configuration", what, "give --config");
        }
        return None;
    };
    match preflight::registry(source, path, in_force).await {
        Ok((registry, warnings)) => {
            for warning in warnings {
                report.advice(
                    "configuration",
                    "configuration_warning",
                    warning,
                    "see the README, \"What is synchronized\"",
                );
            }
            let what = format!("{}: {} tables, {} rules", path.display(), registry.tables.len(), registry.rules.len());
            match in_force {
                Some(in_force) if *in_force != registry => {
                    let what = format!("{} differs from the configuration in force", path.display());
                    let todo = "restore the file that is in force, or undo what changed the tables since: a materializer with this one does not start";
                    report.problem("configuration", "configuration_differs", what, todo);
                }
                _ => report.good("configuration", "configuration", what),
            }
            Some(registry)
        }
        Err(error) => {
            let todo = "correct the file or the table; `materializer check` names the same problems";
            match error.downcast::<preflight::Problems>() {
                Ok(problems) => {
                    for problem in problems.0 {
                        report.problem("configuration", "configuration_invalid", problem, todo);
                    }
                }
                Err(error) => report.unknown("configuration", "not_examined", format!("{error:#}"), todo),
            }
            None
        }
    }
}

/// The table for people.
fn table(report: &Report) -> String {
    let mut text = format!("verdict       {}\n", report.verdict);
    for finding in &report.findings {
        let mark = match finding.grade {
            Grade::Problem => "PROBLEM",
            Grade::Unknown => "UNKNOWN",
            Grade::Advice => "advice",
            Grade::Good => "ok",
        };
        let _ = writeln!(text, "{mark:<8}{:<15}{}", finding.area, finding.what);
        if let Some(todo) = &finding.todo {
            let _ = writeln!(text, "{:<23}what to do: {todo}", "");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_outweighs_what_is_unknown_and_advice_is_healthy() {
        let mut report = Report { verdict: "", findings: Vec::new() };
        report.good("clock", "clock", "right");
        report.advice("slot", "slot_unlimited", "no limit", "set one");
        assert_eq!((report.conclude(), report.verdict), (ExitCode::SUCCESS, "healthy"));
        report.unknown("state", "unreachable", "away", "look");
        assert_eq!((report.conclude(), report.verdict), (ExitCode::from(2), "unknown"));
        report.problem("slot", "slot_vanished", "gone", "reset");
        assert_eq!((report.conclude(), report.verdict), (ExitCode::from(1), "problems"));
        let lines: Vec<String> = table(&report).lines().map(str::to_owned).collect();
        assert_eq!(
            lines[..3],
            ["verdict       problems", "PROBLEM slot           gone", "                       what to do: reset"]
        );
    }
}
