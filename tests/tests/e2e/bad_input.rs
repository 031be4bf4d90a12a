//! What keeps a materializer from starting: one clear line, exit code 1, nothing half-created.

use std::fs;
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use tributary_tests::sandbox::{Options, Sandbox, binary};

struct Case<'a> {
    what: &'a str,
    url: String,
    args: Vec<String>,
    /// What its line must say, in any case of letters.
    hints: &'a [&'a str],
}

fn refused(case: &Case) -> anyhow::Result<()> {
    let mut child = Command::new(binary("materializer")?)
        .arg("run")
        .args(&case.args)
        .env("TRIBUTARY_SOURCE_URL", &case.url)
        .env_remove("TRIBUTARY_STATE_URL")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let deadline = Instant::now() + Duration::from_secs(30);
    while child.try_wait()?.is_none() {
        if Instant::now() > deadline {
            child.kill()?;
            bail!("{}: still running", case.what);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = child.wait_with_output()?;
    let stderr = String::from_utf8(output.stderr)?;
    ensure!(output.status.code() == Some(1), "{}: {}, {stderr}", case.what, output.status);
    ensure!(stderr.trim_end().lines().count() == 1, "{}: not one line: {stderr}", case.what);
    let lower = stderr.to_lowercase();
    for hint in case.hints {
        ensure!(lower.contains(&hint.to_lowercase()), "{}: does not say {hint}: {stderr}", case.what);
    }
    Ok(())
}

fn nothing_was_created(sandbox: &Sandbox) -> anyhow::Result<()> {
    let source = sandbox.source()?;
    for (what, count) in [
        ("slot", "select count(*) from pg_replication_slots where slot_name not like 'taken%'"),
        ("publication", "select count(*) from pg_publication"),
        ("schema", "select count(*) from pg_namespace where nspname like 'tributary%'"),
    ] {
        ensure!(source.number(count)? == 0, "a {what} was left behind");
    }
    Ok(())
}

fn sandbox(settings: &[&str]) -> anyhow::Result<Sandbox> {
    let pg_settings = settings.iter().map(|setting| (*setting).to_owned()).collect();
    Sandbox::start(Options { materializers: 0, pullers: 0, pg_settings, ..Options::default() })
}

#[test]
fn what_a_materializer_refuses() -> anyhow::Result<()> {
    let sandbox = sandbox(&[])?;
    let source = sandbox.source()?;
    source.run(
        "create role plain login password 'plain';
         grant all on schema public to plain; grant all on all tables in schema public to plain; grant create on database app to plain",
    )?;
    let url = sandbox.source_url();
    let (credentials, place) = url.rsplit_once('@').context("an address with a password")?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let taken = listener.local_addr()?.to_string();
    let config = |name: &str, from: &str, to: &str| -> anyhow::Result<Vec<String>> {
        let path = sandbox.dir().join(name);
        fs::write(&path, fs::read_to_string(sandbox.config())?.replacen(from, to, 1))?;
        Ok(vec!["--config".to_owned(), path.display().to_string()])
    };
    let good = || config("good.yaml", "", "");
    let mut port_taken = good()?;
    port_taken.extend(["--admin-listen".to_owned(), taken.clone()]);
    for case in [
        Case {
            what: "no PostgreSQL",
            url: "postgresql://postgres:x@127.0.0.1:1/app".to_owned(),
            args: good()?,
            hints: &["127.0.0.1"],
        },
        Case { what: "wrong password", url: format!("{credentials}x@{place}"), args: good()?, hints: &["password"] },
        Case { what: "no such database", url: format!("{url}x"), args: good()?, hints: &["appx"] },
        Case {
            what: "no REPLICATION",
            url: format!("postgresql://plain:plain@{place}"),
            args: good()?,
            hints: &["REPLICATION"],
        },
        Case { what: "taken port", url: url.clone(), args: port_taken, hints: &[&taken] },
        Case {
            what: "no config",
            url: url.clone(),
            args: vec!["--config".into(), "/nowhere.yaml".into()],
            hints: &["/nowhere.yaml"],
        },
        Case {
            what: "unknown key",
            url: url.clone(),
            args: config("key.yaml", "assignments:", "assignment:")?,
            hints: &["key.yaml:", "assignment"],
        },
        Case {
            what: "unknown relation",
            url: url.clone(),
            args: config("relation.yaml", "public.members", "public.membres\n    id: members")?,
            hints: &["relation.yaml: line 6", "membres"],
        },
        Case {
            what: "unknown column",
            url: url.clone(),
            args: config("column.yaml", "{owner_id}", "{owner}")?,
            hints: &["column.yaml:", "owner"],
        },
        Case {
            what: "not YAML",
            url: url.clone(),
            args: config("yaml.yaml", "tables:", "tables: [")?,
            hints: &["yaml.yaml:"],
        },
    ] {
        refused(&case)?;
        nothing_was_created(&sandbox).with_context(|| case.what.to_owned())?;
    }
    source.run("select pg_create_physical_replication_slot('taken_' || n) from generate_series(1, current_setting('max_replication_slots')::int) n")?;
    refused(&Case { what: "no free slot", url, args: good()?, hints: &["max_replication_slots"] })?;
    nothing_was_created(&sandbox)
}

#[test]
fn a_materializer_refuses_a_server_without_logical_decoding() -> anyhow::Result<()> {
    let sandbox = sandbox(&["wal_level=replica"])?;
    let args = vec!["--config".to_owned(), sandbox.config().display().to_string()];
    refused(&Case { what: "wal_level", url: sandbox.source_url(), args, hints: &["wal_level", "logical"] })?;
    nothing_was_created(&sandbox)
}

#[test]
fn check_names_every_problem() -> anyhow::Result<()> {
    let sandbox = sandbox(&[])?;
    let path = sandbox.dir().join("many.yaml");
    let text = fs::read_to_string(sandbox.config())?;
    let text = text
        .replace("public.members", "public.membres\n    id: members")
        .replace("{assignee_id}", "{assignee}")
        .replace("read_only", "readonly");
    fs::write(&path, text)?;
    let mut launch = sandbox.materializer_launch("check")?;
    launch.args = vec!["check".into(), "--config".into(), path.into()];
    let (status, output) = launch.run()?;
    ensure!(status.code() == Some(1), "{status}: {output}");
    for problem in ["membres", "assignee", "readonly"] {
        ensure!(output.contains(problem), "does not name {problem}: {output}");
    }
    Ok(())
}
