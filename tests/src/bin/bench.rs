//! `bench`: how fast a Tributary is on this machine, beside baselines of the same run. See `bench --help`.

use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;

use clap::{Parser, Subcommand, ValueEnum as _};
use tributary_tests::bench::{self, Measurement, Options};

// As the programs that are measured have it, for the bare handler.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Never set: a signal ends the bench, and with it all that it started.
static CANCELLED: AtomicBool = AtomicBool::new(false);

/// Measures a Tributary beside PostgreSQL's own replication, a bare handler and COPY; prints one Markdown table.
#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    /// Factor of all row counts and durations, for a quick run.
    #[arg(long, default_value_t = 1.0, value_parser = scale)]
    scale: f64,
    /// Measure only this; can be repeated.
    #[arg(long, value_enum)]
    only: Vec<Measurement>,
    /// Keep the state in a database of its own, on the same server.
    #[arg(long)]
    split: bool,
    /// A further setting of PostgreSQL, `name=value`; may be repeated.
    #[arg(long, value_name = "NAME=VALUE")]
    pg_setting: Vec<String>,
}

#[derive(Subcommand)]
enum Command {
    /// The baseline of pulls without changes.
    #[command(name = bench::bare::COMMAND, hide = true)]
    BareHandler {
        #[arg(long)]
        listen: SocketAddr,
        #[arg(long)]
        pool_size: usize,
    },
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match cli.command {
        Some(Command::BareHandler { listen, pool_size }) => bench::bare::serve(listen, pool_size),
        None => measure(cli),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let message = format!("{error:#}").lines().collect::<Vec<_>>().join(" | ");
            say(&format!("error: {message}"));
            ExitCode::FAILURE
        }
    }
}

fn measure(cli: Cli) -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let measurements = if cli.only.is_empty() { Measurement::value_variants().to_vec() } else { cli.only };
    let table = bench::run(&Options {
        scale: cli.scale,
        measurements,
        split: cli.split,
        pg_settings: cli.pg_setting,
        command: ["tests/bench.sh"]
            .into_iter()
            .chain(arguments.iter().map(String::as_str))
            .collect::<Vec<_>>()
            .join(" "),
        say,
        cancelled: &CANCELLED,
    })?;
    io::stdout().write_all(table.markdown().as_bytes())?;
    Ok(())
}

fn scale(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(scale) if scale > 0.0 && scale <= 100.0 => Ok(scale),
        _ => Err("a scale is a number above 0, at most 100".to_owned()),
    }
}

/// A line for who watches; the table alone goes to the standard output.
fn say(line: &str) {
    let _ = writeln!(io::stderr(), "bench: {line}");
}
