//! `materializer doctor`: each thing that can be wrong is found by its name and has a remedy; what is right is no problem.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use anyhow::{Context as _, ensure};
use serde_json::Value;
use tributary_tests::sandbox::{Options, Sandbox};

/// What it says: its exit code, and the findings.
struct Said {
    code: i32,
    json: Value,
}

impl Said {
    /// The grade of the first finding of a code, the worst first.
    fn grade(&self, code: &str) -> Option<&str> {
        self.json["findings"].as_array()?.iter().find(|finding| finding["code"] == code)?["grade"].as_str()
    }

    fn problems(&self) -> Vec<&str> {
        let findings = self.json["findings"].as_array().map(Vec::as_slice).unwrap_or_default();
        findings.iter().filter(|f| f["grade"] == "problem").filter_map(|f| f["code"].as_str()).collect()
    }
}

fn doctor_at(sandbox: &Sandbox, source: Option<String>, args: &[&str]) -> anyhow::Result<Said> {
    let mut launch = sandbox.materializer_launch("doctor")?;
    if let Some(source) = source {
        launch.env = vec![("TRIBUTARY_SOURCE_URL".into(), source.into())];
    }
    launch.args = ["doctor", "--json"].iter().chain(args).map(Into::into).collect();
    let (exit, output) = launch.run()?;
    let json: Value = serde_json::from_str(&output).with_context(|| output.clone())?;
    for finding in json["findings"].as_array().context("findings")? {
        let remedy = finding["todo"].as_str().is_some_and(|todo| !todo.is_empty());
        ensure!(remedy != (finding["grade"] == "good"), "without a remedy: {finding}");
    }
    Ok(Said { code: exit.code().unwrap_or(-1), json })
}

fn doctor(sandbox: &Sandbox, args: &[&str]) -> anyhow::Result<Said> {
    doctor_at(sandbox, None, args)
}

#[test]
fn what_is_wrong_is_found_by_name_with_its_remedy() -> anyhow::Result<()> {
    let mut sandbox = Sandbox::start(Options {
        pullers: 0,
        pg_settings: vec!["logical_decoding_work_mem=1MB".into(), "wal_sender_timeout=0".into()],
        ..Options::default()
    })?;
    let config = sandbox.config().display().to_string();
    let (source, state) = (sandbox.source()?, sandbox.state()?);
    let well = doctor(&sandbox, &["--config", &config])?;
    ensure!(well.code == 0 && well.json["verdict"] == "healthy", "{}", well.json);
    for advice in
        ["slot_unlimited", "decoding_memory", "wal_sender_timeout", "superuser", "unrepresentable", "no_fsync"]
    {
        ensure!(well.grade(advice) == Some("advice"), "{advice}: {}", well.json);
    }
    for good in ["version", "replication", "publication", "slot", "indexes", "clock", "state_schema", "relations"] {
        ensure!(well.grade(good) == Some("good"), "{good}: {}", well.json);
    }

    // The clock and the key ring.
    let skewed = doctor(&sandbox, &["--clock-offset-seconds", "-600"])?;
    ensure!(skewed.code == 1 && skewed.problems() == ["clock_skew", "clock_skew"], "{}", skewed.json);
    let ring = sandbox.dir().join("ring");
    let examined = |text: &str, mode: u32| -> anyhow::Result<Said> {
        fs::write(&ring, text)?;
        fs::set_permissions(&ring, fs::Permissions::from_mode(mode))?;
        doctor(&sandbox, &["--token-keys-file", &ring.display().to_string()])
    };
    let key = "A".repeat(43);
    let sound = examined(&format!("1:{key}"), 0o600)?;
    ensure!(sound.code == 0 && sound.grade("key_ring") == Some("good"), "{}", sound.json);
    ensure!(examined(&format!("1:{key}"), 0o644)?.problems() == ["key_ring_exposed"]);
    let short = examined("1:c2VjcmV0", 0o600)?;
    ensure!(short.problems() == ["key_ring_invalid"] && !short.json.to_string().contains("c2VjcmV0"), "{}", short.json);
    ensure!(doctor(&sandbox, &["--token-keys-file", "/nowhere"])?.code == 2);

    // Relations and indexes.
    for (wrong, right, code) in [
        (
            "alter table documents replica identity nothing",
            "alter table documents replica identity default",
            "no_identity",
        ),
        (
            "alter table projects rename column budget to cost",
            "alter table projects rename column cost to budget",
            "drift",
        ),
        ("alter table users alter name drop not null", "alter table users alter name set not null", "drift"),
        (
            "alter publication tributary drop table templates",
            "alter publication tributary add table templates",
            "publication_altered",
        ),
    ] {
        source.run(wrong)?;
        let said = doctor(&sandbox, &[])?;
        ensure!(said.code == 1 && said.problems() == [code], "{wrong}: {}", said.json);
        source.run(right)?;
    }
    let index = state.text(
        "select indexrelid::regclass::text from pg_index i join pg_class c on c.oid = i.indexrelid
         where c.relnamespace = 'tributary_data'::regnamespace and c.relname like 'by\\_%' limit 1",
    )?;
    state.run(&format!("drop index {index}"))?;
    ensure!(doctor(&sandbox, &[])?.problems() == ["index_missing"]);

    // Roles that may too little.
    source.run(
        "create role plain login password 'plain'; grant usage on schema public, tributary to plain;
         alter table documents enable row level security",
    )?;
    let url = sandbox.source_url();
    let (_, place) = url.rsplit_once('@').context("an address with a password")?;
    let plain = doctor_at(&sandbox, Some(format!("postgresql://plain:plain@{place}")), &["--config", &config])?;
    for code in ["no_replication", "no_create"] {
        ensure!(plain.grade(code) == Some("problem"), "{code}: {}", plain.json);
    }
    let more = ["unreadable", "row_security", "publication_not_ours"];
    let catalog = doctor_at(&sandbox, Some(format!("postgresql://plain:plain@{place}")), &["--config", &config])?;
    ensure!(catalog.code == 1, "{}", catalog.json);
    let told = catalog.json.to_string();
    ensure!(more.iter().any(|code| catalog.grade(code).is_some()) || told.contains("row-level"), "{told}");

    // Nobody follows; then the slot is gone; then nobody answers.
    sandbox.materializers.clear();
    ensure!(doctor(&sandbox, &[])?.problems().contains(&"slot_inactive"));
    source.run("select pg_drop_replication_slot('tributary')")?;
    ensure!(doctor(&sandbox, &[])?.problems().contains(&"slot_vanished"));
    let away = doctor_at(&sandbox, Some("postgresql://postgres:x@127.0.0.1:1/app".into()), &[])?;
    ensure!(away.code == 2 && away.json["verdict"] == "unknown", "{}", away.json);
    Ok(())
}
