//! Logs: human or JSON lines on standard error, filtered by `TRIBUTARY_LOG` (a tracing filter; default `info`).

use std::io::IsTerminal;

/// How log lines are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people.
    Human,
    /// One JSON object a line.
    Json,
}

/// Installs the process's log writer. Call once, first.
pub fn install(format: LogFormat) {
    let filter = tracing_subscriber::EnvFilter::try_from_env("TRIBUTARY_LOG")
        // The replication client logs its own end as an error; we report it where it is handled.
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info,pgwire_replication=off"));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    match format {
        LogFormat::Human => builder.with_ansi(std::io::stderr().is_terminal()).init(),
        LogFormat::Json => builder.json().flatten_event(true).init(),
    }
}
