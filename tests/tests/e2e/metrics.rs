//! The table of metrics in the README is what the admin ports tell, no more and no less; and the programs' own health
//! command asks them.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tributary_tests::http;
use tributary_tests::sandbox::{Options, Sandbox, Service, eventually};

/// Longest wait for a change to be told.
const PATIENCE: Duration = Duration::from_secs(60);

/// Names in the first column of the README's table.
fn documented() -> anyhow::Result<BTreeSet<String>> {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the workspace")?.join("README.md");
    let readme = std::fs::read_to_string(readme)?;
    let table = readme.split("| metric | meaning |").nth(1).context("the README has a table of metrics")?;
    let rows = table.lines().skip(1).take_while(|line| line.starts_with('|'));
    let cells = rows.filter_map(|row| row.split('|').nth(1));
    let names = cells.flat_map(|cell| cell.split('`').filter(|part| part.starts_with("tributary_")));
    Ok(names.map(|name| name.split('{').next().unwrap_or(name).to_owned()).collect())
}

/// Families that an admin port tells.
fn told(service: &Service) -> anyhow::Result<BTreeSet<String>> {
    let text = String::from_utf8(http::get(&format!("{}/metrics", service.admin_url))?.body)?;
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    Ok(types.filter_map(|line| line.split(' ').next()).map(str::to_owned).collect())
}

fn health(service: &Service, program: &str, arguments: &[&str]) -> anyhow::Result<(bool, String)> {
    let address = service.admin_url.strip_prefix("http://").context("an address")?;
    let program = service.process.launch().program.with_file_name(program);
    let output =
        Command::new(program).arg("health").args(["--admin-listen", address]).args(arguments).env_clear().output()?;
    Ok((output.status.success(), String::from_utf8(output.stdout)?))
}

#[test]
fn the_documented_metrics_are_the_live_ones() -> anyhow::Result<()> {
    let mut sandbox = Sandbox::start(Options {
        // Without a limit of the source there is none to be told.
        pg_settings: vec!["max_slot_wal_keep_size=1GB".into()],
        ..Options::default()
    })?;
    let mut client = sandbox.client("u_1", "measured")?;
    client.sync(500)?;
    sandbox.source()?.run("update tasks set priority = priority + 1 where assignee_id = 'u_1'")?;
    let documented = documented()?;
    eventually(PATIENCE, || {
        client.pull_all(500)?;
        let mut live = told(&sandbox.materializers[0])?;
        live.extend(told(&sandbox.pullers[0])?);
        let missing: Vec<_> = documented.difference(&live).collect();
        let undocumented: Vec<_> = live.difference(&documented).collect();
        ensure!(
            missing.is_empty() && undocumented.is_empty(),
            "not told: {missing:?}; not documented: {undocumented:?}"
        );
        Ok(())
    })?;

    for (service, program, role) in
        [(&sandbox.materializers[0], "materializer", "leader"), (&sandbox.pullers[0], "puller", "serving")]
    {
        ensure!(health(service, program, &[])? == (true, format!("ready: {role}\n")), "{program}");
        ensure!(health(service, program, &["--live"])? == (true, "live\n".to_owned()), "{program}");
    }
    // A puller that cannot read the state is alive, and not ready.
    sandbox.state()?.run("alter schema tributary rename to away")?;
    eventually(PATIENCE, || {
        let (ready, line) = health(&sandbox.pullers[0], "puller", &[])?;
        ensure!(!ready && line.starts_with("not ready: "), "{line}");
        Ok(())
    })?;
    ensure!(health(&sandbox.pullers[0], "puller", &["--live"])?.0);
    let gone = sandbox.pullers.remove(0);
    let (admin_url, launch) = (gone.admin_url.clone(), gone.process.launch().clone());
    drop(gone);
    let address = admin_url.strip_prefix("http://").context("an address")?;
    let output = Command::new(&launch.program).args(["health", "--admin-listen", address]).env_clear().output()?;
    ensure!(!output.status.success() && output.stdout.is_empty() && !output.stderr.is_empty(), "{output:?}");
    Ok(())
}
