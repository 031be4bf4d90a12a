//! Values at the ends of their types, other replica identities, tables that hang together, transactions in every order
//! and of every size: each step ends with what `SELECT` gives, by pulls and by a fresh rebuild.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use tributary_tests::client::{Client, ClientError};
use tributary_tests::database::Database;
use tributary_tests::expected;
use tributary_tests::sandbox::{Options, Sandbox, eventually};

use super::data;

const TABLES: [&str; 6] = ["extremes", "whole", "named", "parent", "child", "parted"];
/// Rows of one part of a state transaction here.
const BATCH: i64 = 64;

fn start() -> anyhow::Result<Sandbox> {
    Sandbox::start(Options {
        config: Some(data("extremes.yaml")),
        schema: Some(vec![data("extremes.sql")]),
        pg_settings: ["logical_decoding_work_mem=64kB", "max_prepared_transactions=10"].map(str::to_owned).into(),
        materializer_args: ["--batch-rows", &BATCH.to_string(), "--batch-octets", "65536"].map(Into::into).into(),
        ..Options::default()
    })
}

fn settle(client: &mut Client, source: &Database, limit: i64) -> anyhow::Result<()> {
    eventually(Duration::from_secs(60), || {
        match client.sync(limit) {
            Err(violation @ ClientError::Violation(_)) => panic!("{violation}"),
            outcome => outcome?,
        }
        for table in TABLES {
            expected::compare(client, source, "owner:1", table, &format!("{table} where owner_id = 1"))?;
        }
        Ok(())
    })
}

fn both(sandbox: &Sandbox, client: &mut Client, source: &Database, limit: i64, step: &str) -> anyhow::Result<()> {
    settle(client, source, limit).with_context(|| format!("after {step}"))?;
    let mut fresh = sandbox.client("1", &format!("fresh-{}", uuid::Uuid::new_v4()))?;
    settle(&mut fresh, source, 1000).with_context(|| format!("rebuilt after {step}"))?;
    ensure!(client.rows == fresh.rows, "pulled and rebuilt rows differ after {step}");
    Ok(())
}

const STEPS: &[&str] = &[
    // The ends of each type; those that have no portable form stand as text by configuration.
    "insert into extremes (id, owner_id, f4, f8, num, dt, ts, tstz, jb, j, i8, bounded) values
     (1, 1, 'NaN', 'NaN', 'NaN', 'infinity', 'infinity', '-infinity', '12345678901234567890123', '{\"a\\u0000b\": \"\\u0000\"}', 9223372036854775807, 999999999999999.99999),
     (2, 1, 'Infinity', '-Infinity', '-0.000', '-infinity', '4713-01-01 00:00:00 BC', '294276-12-31 23:59:59.999999+00', '{\"n\": 1e400}', '[]', -9223372036854775808, -0.00001),
     (3, 1, 1.17549435e-38, 5e-324, 'Infinity', '4713-01-01 BC', '294276-12-31 23:59:59.999999', '4713-01-01 BC', '1.10', 'null', 0, null),
     (-9223372036854775808, 1, 0.1, 1.7976931348623157e308, 1, '5874897-12-31', '0001-01-01', '0001-01-01', 'null', '\"\\u2028\"', null, 0)",
    // Very long numbers.
    "update extremes set long_num = ('1' || repeat('0', 5000))::numeric + 7 where id = 1;
     update extremes set long_num = ('-0.' || repeat('0', 4000) || '12345678900')::numeric where id = 2",
    // Replica identity FULL and by the key's index: changes, moved keys, deletes.
    "insert into whole select n, 1, 'w' || n from generate_series(1, 200) n; insert into named select n, 1, 'n' || n from generate_series(1, 200) n",
    "update whole set v = v || '!' where id % 3 = 0; update named set v = v || '!' where id % 3 = 0",
    "update whole set id = id + 1000 where id % 5 = 0; update named set id = id + 1000 where id % 5 = 0",
    "delete from whole where id % 7 = 0; delete from named where id % 7 = 0",
    "update whole set owner_id = 2 where id % 2 = 0; update named set owner_id = null where id % 2 = 0",
    // TRUNCATE reaches the tables that refer to it, alone and inside a transaction that fills them again.
    "insert into parent select n, 1, 'p' from generate_series(1, 150) n; insert into child select n, n, 1 from generate_series(1, 150) n",
    "truncate parent cascade",
    "begin; insert into parent values (1, 1, 'gone'); insert into child values (1, 1, 1); truncate parent cascade; insert into parent values (1, 1, 'kept'), (2, 1, 'kept'); insert into child values (7, 2, 1); commit",
    // Partitions made later, attached empty and filled, moved between, emptied and detached.
    "insert into parted select n, 1, 'a' from generate_series(1, 90) n",
    "create table parted_second partition of parted for values from (100) to (200); insert into parted select n, 1, 'b' from generate_series(100, 150) n",
    "create table parted_third (id integer primary key, owner_id integer, v text); alter table parted attach partition parted_third for values from (200) to (300); insert into parted_third values (250, 1, 'c')",
    "update parted set id = id + 115 where id between 40 and 60; update parted_third set v = 'd'",
    "delete from parted where id >= 100 and id < 200; alter table parted detach partition parted_second; insert into parted_second values (101, 1, 'not ours')",
    "truncate parted_third; truncate parted",
    // Rolled back savepoints, larger than what is decoded in memory.
    "begin; insert into whole select n, 1, repeat('x', 500) from generate_series(2000, 2500) n; savepoint s;
     insert into whole select n, 1, repeat('y', 500) from generate_series(3000, 3500) n; update whole set v = 'lost'; rollback to s;
     savepoint t; delete from whole where id between 2100 and 2200; release t;
     savepoint u; truncate named; rollback to u; insert into whole values (1, 1, 'end') on conflict (id) do update set v = 'end'; commit",
    // Nothing but messages: the stream passes them, whoever's they are.
    "select pg_logical_emit_message(true, 'somebody', repeat('x', 100000)); select pg_logical_emit_message(false, 'tributary.accept_write', '{}')",
    "begin; select pg_logical_emit_message(true, 'somebody', 'rolled back'); rollback; select tributary.accept_write('9', 'nobody')",
];

#[test]
fn extremes_and_orders_end_as_select_says() -> anyhow::Result<()> {
    let sandbox = start()?;
    let source = sandbox.source()?;
    let mut client = sandbox.client("1", "extremes")?;
    settle(&mut client, &source, 100)?;
    for step in STEPS {
        source.run(step).with_context(|| format!("in {step}"))?;
        both(&sandbox, &mut client, &source, 37, step)?;
    }
    ensure!(!client.manifest()?.table("extremes")?.fields.contains_key("remainder"), "a generated column is delivered");

    // Prepared transactions: nothing before their commit, then all of it; nothing of a rolled back one.
    source.run("begin; insert into whole values (8001, 1, 'prepared'); delete from named where id = 1; prepare transaction 'one'")?;
    source.run("begin; insert into whole values (8002, 1, 'never'); delete from child; prepare transaction 'two'")?;
    source.run("insert into named values (8003, 1, 'in between')")?;
    both(&sandbox, &mut client, &source, 100, "prepare")?;
    source.run("rollback prepared 'two'")?;
    source.run("commit prepared 'one'")?;
    both(&sandbox, &mut client, &source, 100, "commit prepared")?;

    // Transactions that commit in another order than they wrote, over the same tables.
    let (early, late) = (sandbox.source()?, sandbox.source()?);
    for round in 0..5 {
        let base = 9000 + round * 100;
        early.run(&format!(
            "begin; insert into whole select n, 1, 'early' from generate_series({base}, {base} + 40) n"
        ))?;
        late.run(&format!(
            "begin; insert into whole select n, 1, 'late' from generate_series({base} + 50, {base} + 90) n"
        ))?;
        early.run("update extremes set body = 'early' where id = 1")?;
        late.run("update extremes set body = 'late' where id = 2; update named set v = 'late' where id = 8003")?;
        late.run("commit")?;
        early.run("update named set v = 'early' where id = 8003; delete from whole where v = 'late'")?;
        if round % 2 == 0 { early.run("commit")? } else { early.run("rollback")? }
    }
    both(&sandbox, &mut client, &source, 100, "interleaved commits")?;

    sizes(&sandbox, &mut client, &source)
}

/// Transactions and pages of N−1, N, N+1 and 2N rows, for each N at which something is cut: the batch, the page.
fn sizes(sandbox: &Sandbox, client: &mut Client, source: &Database) -> anyhow::Result<()> {
    source.run("truncate whole")?;
    settle(client, source, 1000)?;
    let mut next = 1;
    // 256 is the burst of events that is taken in one go.
    for n in [BATCH, 256] {
        for rows in [n - 1, n, n + 1, 2 * n] {
            let last = next + rows - 1;
            source.run(&format!("insert into whole select n, 1, 'size' from generate_series({next}, {last}) n"))?;
            // A page that holds all but one, exactly all, and one more than there is.
            for limit in [rows - 1, rows, rows + 1] {
                settle(client, source, limit.min(1000)).with_context(|| format!("{rows} rows by {limit}"))?;
                source.run(&format!("update whole set v = 'by {limit}' where id between {next} and {last}"))?;
            }
            settle(client, source, rows.min(1000))?;
            next = last + 1;
        }
    }
    let held = client.rows["owner:1"].len() as i64;
    for limit in [held - 1, held, held + 1, BATCH - 1, BATCH, BATCH + 1, 2 * BATCH] {
        let limit = limit.clamp(1, 1000);
        let mut fresh = sandbox.client("1", &format!("pages-{limit}-{}", uuid::Uuid::new_v4()))?;
        fresh.connect()?;
        fresh.rebuild("owner:1", limit)?;
        ensure!(fresh.rows["owner:1"] == client.rows["owner:1"], "pages of {limit}");
    }
    // Values around the bound of octets: each row a batch of its own, or just not.
    source.run("insert into extremes (id, owner_id, body) select 100 + n, 1, repeat('o', 65536 - 600 + n * 100) from generate_series(1, 12) n")?;
    both(sandbox, client, source, 5, "rows around the octets of a batch")
}

/// A value of 50 MB: inserted, changed beside, moved to another key, replaced, deleted.
#[test]
fn a_value_of_fifty_megabytes_passes() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options {
        config: Some(data("extremes.yaml")),
        schema: Some(vec![data("extremes.sql")]),
        ..Options::default()
    })?;
    let source = sandbox.source()?;
    let mut client = sandbox.client("1", "large")?;
    settle(&mut client, &source, 100)?;
    source.run("insert into extremes (id, owner_id, body) select 1, 1, string_agg(md5(n::text), '') from generate_series(1, 1600000) n")?;
    settle(&mut client, &source, 100)?;
    for step in [
        "update extremes set i8 = 5 where id = 1",
        "update extremes set id = 2 where id = 1",
        "begin; update extremes set body = body || 'é' where id = 2; update extremes set i8 = 6 where id = 2; commit",
    ] {
        source.run(step)?;
        settle(&mut client, &source, 100).with_context(|| step.to_owned())?;
    }
    let mut fresh = sandbox.client("1", "large-fresh")?;
    settle(&mut fresh, &source, 100)?;
    ensure!(client.rows == fresh.rows, "pulled and rebuilt rows differ");
    source.run("delete from extremes")?;
    settle(&mut client, &source, 100)?;
    ensure!(sandbox.status()?.findings().is_empty(), "{}", sandbox.status()?.json);
    Ok(())
}

/// Many small transactions, and one large one in flat memory. With `TRIBUTARY_TEST_FULL` in full size.
#[test]
fn fifty_thousand_transactions_and_one_large_one() -> anyhow::Result<()> {
    let full = std::env::var_os("TRIBUTARY_TEST_FULL").is_some();
    let (small, large) = if full { (50_000, 2_000_000) } else { (20_000, 200_000) };
    let mut options =
        Options { config: Some(data("extremes.yaml")), schema: Some(vec![data("extremes.sql")]), ..Options::default() };
    options.pg_settings.push("logical_decoding_work_mem=4MB".into());
    let sandbox = Sandbox::start(options)?;
    let source = sandbox.source()?;
    let mut client = sandbox.client("1", "many")?;
    settle(&mut client, &source, 1000)?;
    source.run(&format!(
        "do $$ begin for n in 1..{small} loop insert into whole values (n, 1, 'one'); commit; end loop; end $$"
    ))?;
    settle(&mut client, &source, 1000)?;
    let materializer = sandbox.materializers[0].process.pid();
    let before = peak(materializer)?;
    // Of another user, so that it is the materializer's memory and not a client's that is looked at.
    source.run(&format!("insert into named select n, 2, repeat('v', 100) from generate_series(1, {large}) n"))?;
    source.run("update parent set v = 'after' where false; insert into parent values (1, 1, 'after')")?;
    eventually(Duration::from_secs(240), || settle(&mut client, &source, 1000))?;
    let grown = peak(materializer)?.saturating_sub(before);
    ensure!(grown < 100 << 20, "a transaction of {large} rows took {} MiB", grown >> 20);
    let captured = sandbox.state()?.number("select count(*) from tributary_data.\"public.named\"")?;
    ensure!(captured == large, "{captured} of {large} rows");
    Ok(())
}

/// The most memory that a process ever held, in octets.
fn peak(pid: u32) -> anyhow::Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? << 10)
}

/// What would be read wrong or not at all is refused by `check`, with the reason.
#[test]
fn check_refuses_row_security_and_other_replica_identities() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options {
        config: Some(data("extremes.yaml")),
        schema: Some(vec![data("extremes.sql")]),
        materializers: 0,
        pullers: 0,
        ..Options::default()
    })?;
    let source = sandbox.source()?;
    source.run(
        "create role reader login replication password 'reader'; grant select on all tables in schema public to reader",
    )?;
    let url = sandbox.source_url();
    let (head, tail) = url.split_once("//").context("a url")?;
    let (_, host) = tail.split_once('@').context("a url with a role")?;
    let reader = format!("{head}//reader:reader@{host}");
    let config = sandbox.config().display().to_string();
    let check = || sandbox.materializer_command(&["check", "--config", &config, "--source-url", &reader]);
    let (exit, output) = check()?;
    ensure!(exit.success(), "{output}");
    for (change, undo, hint) in [
        ("alter table whole enable row level security", "alter table whole disable row level security", "row"),
        ("alter table whole replica identity nothing", "alter table whole replica identity full", "replica identity"),
        (
            "create unique index named_other on named (v); alter table named alter v set not null, replica identity using index named_other",
            "alter table named replica identity using index named_key",
            "replica identity",
        ),
    ] {
        source.run(change)?;
        let (exit, output) = check()?;
        ensure!(exit.code() == Some(1) && output.to_lowercase().contains(hint), "{change}: {exit}: {output}");
        source.run(undo)?;
    }
    let (exit, output) = check()?;
    ensure!(exit.success(), "{output}");
    Ok(())
}
