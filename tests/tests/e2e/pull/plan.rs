//! Reads of a pull are bounded by its page: the plan of its statement on a large state (ADR 003, "Per-scope eligibility
//! before the limit": bounded scans, equivalent to the full model).

use anyhow::{Context as _, ensure};
use serde_json::Value;
use tributary_shared::store::pull::CANDIDATES;
use tributary_shared::store::session::REQUEST_PLANS;
use tributary_tests::sandbox::{Options, Sandbox};

const SCOPES: i64 = 40;
const ENTRIES_PER_SCOPE: i64 = 6_000;
const ASKED_SCOPES: i64 = 8;
const LIMIT: i64 = 101;

/// Every node with its depth-first ancestors' loops already counted in: `Actual Rows` × `Actual Loops`.
fn nodes<'a>(plan: &'a Value, found: &mut Vec<&'a Value>) {
    found.push(plan);
    for child in plan["Plans"].as_array().into_iter().flatten() {
        nodes(child, found);
    }
}

fn produced(node: &Value) -> f64 {
    node["Actual Rows"].as_f64().unwrap_or(0.0) * node["Actual Loops"].as_f64().unwrap_or(0.0)
}

fn check(plan: &Value, what: &str) -> anyhow::Result<()> {
    let mut all = Vec::new();
    nodes(&plan[0]["Plan"], &mut all);
    let bound = (ASKED_SCOPES * LIMIT) as f64;
    let mut index_scans = 0;
    for node in all {
        let kind = node["Node Type"].as_str().context("a node type")?;
        if node["Relation Name"] == "scope_entry" {
            ensure!(matches!(kind, "Index Scan" | "Index Only Scan"), "{what}: {kind} of the entries\n{plan:#}");
            ensure!(node["Index Name"] == "scope_entry_position", "{what}: another index\n{plan:#}");
            ensure!(
                node["Rows Removed by Filter"].as_f64().unwrap_or(0.0) == 0.0,
                "{what}: entries are filtered\n{plan:#}"
            );
            ensure!(produced(node) <= bound, "{what}: {} entries were read\n{plan:#}", produced(node));
            index_scans += 1;
        }
        ensure!(!kind.contains("Bitmap"), "{what}: {kind}\n{plan:#}");
        if kind.contains("Sort") {
            let input = node["Plans"][0].clone();
            ensure!(produced(&input) <= bound, "{what}: a sort of {} rows\n{plan:#}", produced(&input));
        }
        let buffers =
            node["Shared Hit Blocks"].as_f64().unwrap_or(0.0) + node["Shared Read Blocks"].as_f64().unwrap_or(0.0);
        ensure!(buffers <= 3.0 * bound, "{what}: {buffers} blocks were read\n{plan:#}");
    }
    ensure!(index_scans == 1, "{what}: {index_scans} scans of the entries\n{plan:#}");
    Ok(())
}

#[test]
fn the_candidates_of_a_page_are_read_by_bounded_index_scans() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options { pullers: 0, ..Options::default() })?;
    let state = sandbox.state()?;
    state.run("alter table tributary.scope_entry set (autovacuum_enabled = off)")?;
    state.run(&format!(
        "insert into tributary.scope (scope_id) select 'large:' || n from generate_series(1, {SCOPES}) n;
         insert into tributary.scope_entry (row_id, commit_lsn, ordinal, scope_no, table_no, present, seal)
         select 1000000 + n, 1000 + n / 7, (n % 7) << 24, s.scope_no, 1, n % 5 <> 0, 'x'
         from (select scope_no, row_number() over (order by scope_no) as index from tributary.scope where scope_id like 'large:%') s,
             generate_series(1, {ENTRIES_PER_SCOPE}) n
         order by n, s.index"
    ))?;
    ensure!(state.number("select count(*) from tributary.scope_entry")? >= 200_000);
    // Cursors at the start, in the middle, near the end and at the end.
    let numbers = state.text(&format!(
        "select array_agg(scope_no)::text
         from (select scope_no from tributary.scope where scope_id like 'large:%' order by scope_no limit {ASKED_SCOPES}) s"
    ))?;
    let end = i64::MAX;
    let arguments = format!(
        "'{numbers}', '{{0, 0, 1000, 1400, 1400, 1800, 1850, 1900}}', '{{0, 0, {end}, 0, 16777216, 0, 0, {end}}}', {LIMIT}"
    );
    state.run(&format!("prepare candidates (integer[], bigint[], bigint[], bigint) as {CANDIDATES}"))?;
    for (name, value) in REQUEST_PLANS {
        state.run(&format!("set {name} = {value}"))?;
    }
    // Before the first statistics, after them, and with those of a time before much was written; with a plan for these
    // arguments and with the one for any.
    for statistics in ["no statistics", "statistics", "stale statistics"] {
        if statistics == "statistics" {
            state.run("analyze tributary.scope_entry")?;
        }
        if statistics == "stale statistics" {
            state.run(&format!(
                "insert into tributary.scope_entry (row_id, commit_lsn, ordinal, scope_no, table_no, present, seal)
                 select 2000000 + n, 3000 + n, 0, s.scope_no, 1, true, 'x'
                 from tributary.scope s, generate_series(1, {ENTRIES_PER_SCOPE}) n
                 where s.scope_no = any('{numbers}')"
            ))?;
        }
        for mode in ["force_custom_plan", "force_generic_plan"] {
            state.run(&format!("set plan_cache_mode = {mode}"))?;
            let text =
                state.texts(&format!("explain (analyze, buffers, format json) execute candidates ({arguments})"))?;
            let text = text.into_iter().flatten().flatten().collect::<Vec<_>>().join("\n");
            check(&serde_json::from_str(&text)?, &format!("{statistics}, {mode}"))?;
        }
    }
    Ok(())
}
