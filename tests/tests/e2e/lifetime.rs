//! How a sandbox begins and ends: whatever ends it, nothing that it started stays.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tributary_tests::ready::Ready;
use tributary_tests::sandbox::{Options, Sandbox, eventually};

/// A directory that goes away with its test.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> anyhow::Result<Self> {
        let path = std::env::temp_dir().join(format!("tributary-test-{}", uuid::Uuid::new_v4().simple()));
        fs::create_dir(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// `sandbox up` in the background, killed at the end of its test.
struct Up(Child);

impl Drop for Up {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn up(scratch: &Scratch, args: &[&str]) -> anyhow::Result<(Up, Ready)> {
    let ready_file = scratch.0.join("ready.json");
    // A killed sandbox leaves its file behind, and the next one may take a moment to replace it.
    if ready_file.exists() {
        fs::remove_file(&ready_file)?;
    }
    let mut child = Command::new(env!("CARGO_BIN_EXE_sandbox"))
        .args(["up", "--port-base", "0", "--dir"])
        .arg(scratch.0.join("sandbox"))
        .arg("--ready-file")
        .arg(&ready_file)
        .args(args)
        .stdout(Stdio::null())
        .stderr(Stdio::inherit())
        .spawn()?;
    let ready = eventually(Duration::from_secs(120), || {
        if let Some(status) = child.try_wait()? {
            panic!("the sandbox ended: {status}");
        }
        Ready::read(&ready_file)
    })?;
    Ok((Up(child), ready))
}

/// Processes whose command line or environment names this directory, but for this test's own.
fn processes_of(dir: &Path, ready: &Ready) -> Vec<String> {
    let own: Vec<_> = [ready.pg.pid]
        .into_iter()
        .chain(ready.materializers.iter().map(|m| m.pid))
        .chain(ready.pullers.iter().map(|p| p.pid))
        .collect();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        // PostgreSQL's workers have titles instead of arguments; their working directory tells.
        let works_in = fs::read_link(entry.path().join("cwd")).unwrap_or_default();
        let text = String::from_utf8_lossy(&command).replace('\0', " ");
        if !command.is_empty()
            && (own.contains(&pid) || works_in.starts_with(dir) || text.contains(&*dir.to_string_lossy()))
        {
            found.push(format!("{pid} {text}"));
        }
    }
    found
}

fn signal(child: &Child, signal: Signal) -> anyhow::Result<()> {
    kill_process(Pid::from_raw(i32::try_from(child.id())?).context("a process id")?, signal)?;
    Ok(())
}

fn killed_leaves_nothing(args: &[&str]) -> anyhow::Result<()> {
    let scratch = Scratch::new()?;
    let dir = scratch.0.join("sandbox");
    let (mut sandbox, ready) = up(&scratch, args)?;
    ensure!(!processes_of(&dir, &ready).is_empty(), "the test must see what runs");
    signal(&sandbox.0, Signal::KILL)?;
    sandbox.0.wait()?;
    eventually(Duration::from_secs(20), || {
        let left = processes_of(&dir, &ready);
        ensure!(left.is_empty(), "left running: {left:?}");
        Ok(())
    })?;
    // The same directory starts again, with the same secrets and data.
    let (mut sandbox, again) = up(&scratch, args)?;
    ensure!(again.jwt_secret == ready.jwt_secret);
    let tasks =
        tributary_tests::database::Database::connect(&again.database_url)?.number("select count(*) from tasks")?;
    ensure!(tasks == 2000, "{tasks} tasks after a restart");
    signal(&sandbox.0, Signal::TERM)?;
    let status = sandbox.0.wait()?;
    ensure!(status.success(), "SIGTERM is an orderly end, not {status}");
    ensure!(processes_of(&dir, &again).is_empty(), "left running after SIGTERM");
    ensure!(!scratch.0.join("ready.json").exists(), "the ready file outlived the sandbox");
    ensure!(!again.pg.data_dir.is_empty() && !Path::new(&again.pg.data_dir).join("postmaster.pid").exists());
    Ok(())
}

#[test]
fn postgres_alone_does_not_outlive_a_killed_sandbox() -> anyhow::Result<()> {
    killed_leaves_nothing(&["--materializers", "0", "--pullers", "0"])
}

#[test]
fn nothing_outlives_a_killed_sandbox() -> anyhow::Result<()> {
    killed_leaves_nothing(&["--materializers", "2", "--pullers", "2", "--split"])
}

#[test]
fn sandboxes_run_side_by_side_and_go_away() -> anyhow::Result<()> {
    let bare = || Options { materializers: 0, pullers: 0, ..Options::default() };
    let (one, two) = (Sandbox::start(bare())?, Sandbox::start(bare())?);
    ensure!(one.postgres.port() != two.postgres.port());
    one.source()?.run("delete from comments")?;
    ensure!(two.source()?.number("select count(*) from comments")? == 1500);
    let dirs = [one.dir().to_owned(), two.dir().to_owned()];
    drop((one, two));
    ensure!(dirs.iter().all(|dir| !dir.exists()), "a temporary directory stayed");
    Ok(())
}

#[test]
fn a_taken_port_and_a_bad_schema_are_one_line_and_exit_code_1() -> anyhow::Result<()> {
    let scratch = Scratch::new()?;
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port().to_string();
    let bad = scratch.0.join("bad.sql");
    fs::write(&bad, "create table a (id int primary key);\nselect * from nowhere;\n")?;
    let bad = bad.display().to_string();
    for (args, hint) in [
        (vec!["--port-base", port.as_str()], "--port-base"),
        (vec!["--port-base", "0", "--schema", &bad], "nowhere"),
        (vec!["--port-base", "0", "--pg-bin", "/nowhere"], "/nowhere"),
        (vec!["--port-base", "0", "--pg-setting", "no_such_setting=1"], "no_such_setting"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_sandbox"))
            .args(["up", "--materializers", "0", "--pullers", "0"])
            .args(&args)
            .env("TMPDIR", &scratch.0)
            .output()?;
        let stderr = String::from_utf8(output.stderr)?;
        ensure!(output.status.code() == Some(1), "{args:?}: {}", output.status);
        ensure!(stderr.lines().count() == 1 && stderr.contains(hint), "{args:?}: {stderr}");
        let left = fs::read_dir(&scratch.0)?.flatten().filter(|entry| entry.path().is_dir()).count();
        ensure!(left == 0, "{args:?} left a directory behind");
    }
    Ok(())
}

#[test]
fn the_demonstration_succeeds() -> anyhow::Result<()> {
    let output = Command::new(env!("CARGO_BIN_EXE_sandbox")).args(["demo", "--split"]).output()?;
    let (stdout, stderr) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
    ensure!(output.status.success(), "{stderr}\n{stdout}");
    ensure!(stdout.contains("every digest was verified"), "{stdout}");
    Ok(())
}
