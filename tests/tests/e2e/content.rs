//! Row content: whatever the rows hold and however they change, the client's copy is what `SELECT` gives.

mod extremes;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tributary_tests::client::{Client, ClientError};
use tributary_tests::database::Database;
use tributary_tests::expected;
use tributary_tests::sandbox::{Options, Sandbox, eventually};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data").join(name)
}

fn options() -> Options {
    Options { config: Some(data("content.yaml")), schema: Some(vec![data("content.sql")]), ..Options::default() }
}

/// One row with a value of each type; the values are such that settings of a session would show in their text.
const KINDS: &str = "'s', 'vc', 'c', '0197e83a-f7e8-7e21-92c0-c621732bd5de', 'it''s ok', 1.500, row(1, 'a,b'), '10.0.0.1/24',
    '1 year 2 days 03:04:05.006', '12:00:00+02', '{1,NULL,3}', '[1,5)', -5, 7, 9223372036854775807, 4000000000,
    123456789012345678901234567890.000100, -0.50000, 0.1, 1e-7, true, '2024-02-29 12:34:56.1', '2024-02-29 12:34:56.123456+05',
    '0001-01-01', '23:59:59.9', '{\"b\": 1.0, \"a\": [null, \"\\u00e9\"]}', '{\"z\": 1e2, \"a\": {}}', '\\x00ff10', '12.34',
    '<a>é</a>', 'pg_class'";

fn settle(client: &mut Client, source: &Database) -> anyhow::Result<()> {
    eventually(Duration::from_secs(30), || {
        match client.sync(100) {
            Err(violation @ ClientError::Violation(_)) => panic!("{violation}"),
            outcome => outcome?,
        }
        expected::compare(client, source, "all", "kinds", "kinds")?;
        expected::compare(client, source, "all", "mixed", "\"Mixed Case\"")?;
        for table in ["wide", "parted", "whole"] {
            expected::compare(client, source, "owner:1", table, &format!("{table} where owner_id = 1"))?;
        }
        Ok(())
    })
}

/// Steps that each are a transaction of their own, or several.
const STEPS: &[&str] = &[
    // Keys with colons, quotes and characters of two octets.
    "insert into \"Mixed Case\" values ('a:b', 'x', 1), ('it''s \"q\"', null, 2), ('größe', 'é', null), ('%', E'tab\\tnew\\nline\\\\', 3)",
    "update \"Mixed Case\" set \"Key:1\" = 'moved:' || \"Key:1\", \"größe\" = 9 where \"select\" is not null",
    // TOAST: inserted and updated in one transaction; updated beside; the key changed beside; an own long key.
    "begin; insert into wide select 'w' || n, 1, 'n', (select string_agg(md5(n::text || i::text), '') from generate_series(1, 400) i) from generate_series(1, 5) n;
     update wide set note = 'again' where id = 'w1'; commit",
    "update wide set note = 'changed' where id = 'w2'",
    "update wide set id = 'renamed', note = 'moved' where id = 'w3'",
    "begin; update wide set id = 'twice' where id = 'w4'; update wide set id = 'thrice' where id = 'twice'; update wide set note = 'end' where id = 'thrice'; commit",
    "update wide set owner_id = 2 where id = 'w5'; update wide set owner_id = 1 where id = 'w5'",
    "insert into wide select string_agg(md5(i::text), '') || right(md5('k'), 4), 1, 'long key', 'b' from generate_series(1, 78) i",
    "update wide set note = 'long key changed' where length(id) > 2000",
    "update wide set id = id || 'x' where length(id) > 2000",
    // One key inserted, deleted, inserted in one transaction; and across transactions.
    "begin; insert into whole values (1, 1, 'a'); delete from whole where id = 1; insert into whole values (1, 1, 'b'); commit",
    "delete from whole where id = 1; insert into whole values (1, 1, 'c'); update whole set id = 2 where id = 1; update whole set id = 1 where id = 2",
    // TRUNCATE, alone and with rows before and after it in one transaction.
    "insert into whole select n, 1, 'n' from generate_series(10, 2000) n",
    "begin; insert into whole values (5000, 1, 'gone'); truncate whole; insert into whole values (1, 1, 'kept'), (5000, 1, 'again'); commit",
    "truncate whole; truncate wide, whole",
    "insert into wide values ('back', 1, null, 'b')",
    // Partitions: under the root's name, moving between partitions, attached and detached.
    "insert into parted select n, 1, 'p' from generate_series(1, 300, 7) n",
    "update parted set id = id + 500 where id < 50",
    "update parted set owner_id = 2 where id % 2 = 0; delete from parted where id % 3 = 0",
    // Rolled back savepoints leave nothing.
    "begin; insert into whole values (7, 1, 'a'); savepoint s; insert into whole values (8, 1, 'b'); update whole set v = 'c'; rollback to s; insert into whole values (9, 1, 'd'); commit",
    // Enums extended while streaming.
    "alter type mood add value 'glad'",
    "update kinds set m = 'glad', arr = '{{1,2},{3,4}}', jb = 'null', j = null where id = 1",
    // A column that the configuration does not know of yet changes nothing.
    "alter table whole add column later text default 'x'; insert into whole values (77, 1, 'v', 'later')",
];

#[test]
fn whatever_rows_hold_the_client_holds_what_select_gives() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(options())?;
    let source = sandbox.source()?;
    source.run(&format!("insert into kinds values (1, {KINDS}); insert into kinds (id) values (2)"))?;
    let mut client = sandbox.client("1", "content")?;
    settle(&mut client, &source)?;
    for step in STEPS {
        source.run(step)?;
        settle(&mut client, &source).with_context(|| format!("after {step}"))?;
    }
    let mut fresh = sandbox.client("1", "content-fresh")?;
    settle(&mut fresh, &source)?;
    for scope in ["all", "owner:1"] {
        ensure!(client.rows.get(scope) == fresh.rows.get(scope), "pulled and rebuilt rows of {scope} differ");
    }
    Ok(())
}

/// Rows of the baseline and of the stream have the same text, whatever the settings of the server, the database and
/// the role.
#[test]
fn the_baseline_and_the_stream_format_values_alike() -> anyhow::Result<()> {
    let hostile = [
        "DateStyle=German, DMY",
        "IntervalStyle=sql_standard",
        "TimeZone=America/St_Johns",
        "bytea_output=escape",
        "extra_float_digits=-15",
        "quote_all_identifiers=on",
        "xmlbinary=hex",
    ];
    let mut options = options();
    options.pg_settings = hostile.iter().map(|&setting| setting.to_owned()).collect();
    options.prepare = Some(Box::new(|postgres| {
        let source = postgres.connect("app")?;
        source.run(&format!("insert into kinds values (1, {KINDS})"))?;
        source.run(
            "alter role current_user set datestyle = 'SQL, DMY'; alter role current_user set timezone = 'Asia/Kathmandu';
             alter database app set intervalstyle = 'iso_8601'; alter database app set extra_float_digits = -10;
             alter role current_user in database app set bytea_output = 'escape'",
        )
    }));
    let sandbox = Sandbox::start(options)?;
    let source = sandbox.source()?;
    source.run(&format!("insert into kinds values (2, {KINDS})"))?;
    let mut client = sandbox.client("1", "formats")?;
    let row = |client: &Client, key: &str| -> anyhow::Result<String> {
        let row = client.contents_of("all", "kinds", key).with_context(|| format!("no row {key}"))?;
        Ok(row.canonical()?.replace("\"id\":\"2\"", "\"id\":\"1\""))
    };
    eventually(Duration::from_secs(30), || {
        client.sync(100)?;
        row(&client, "2").map(|_| ())
    })?;
    ensure!(row(&client, "1")? == row(&client, "2")?, "{}\n{}", row(&client, "1")?, row(&client, "2")?);
    for fragment in [
        "\"tstz\":\"2024-02-29T07:34:56.123456Z\"",
        "\"iv\":\"1 year 2 days 03:04:05.006\"",
        "\"by\":\"AP8Q\"",
        "\"f8\":1e-7",
        "\"mny\":\"$12.34\"",
        "\"num\":\"123456789012345678901234567890.0001\"",
        "\"jb\":\"{\\\"a\\\":{},\\\"z\\\":100}\"",
    ] {
        ensure!(row(&client, "1")?.contains(fragment), "{fragment} is not in {}", row(&client, "1")?);
    }
    Ok(())
}
