//! Pages of 1,000 rows, of a rebuild and of a pull, over one connection; beside COPY of the same rows over one session.

use std::time::Instant;

use anyhow::ensure;
use futures_util::TryStreamExt as _;

use super::Options;
use super::session::Session;
use super::site::Site;
use super::table::Figure;

/// Rows of a rebuild, and then of a pull.
const ROWS: i64 = 100_000;
/// Whose they are.
const OWNER: i64 = 7;
/// Least part of COPY's speed.
const TARGET: f64 = 0.2;

pub(super) fn measure(options: &Options, site: &Site) -> anyhow::Result<Vec<Figure>> {
    let rows = options.scaled(ROWS);
    let scope = format!("owner:{OWNER}");
    let user = OWNER.to_string();
    let speed = |started: Instant| rows as f64 / started.elapsed().as_secs_f64();

    site.give(OWNER, 1, rows)?;
    let mut first = Session::open(site, &user, "first", false)?;
    let mut second = Session::open(site, &user, "second", false)?;
    site.say("rebuild pages");
    let started = Instant::now();
    ensure!(first.rebuild(&scope)? == rows, "the first rebuild has another number of rows");
    let staging = speed(started);
    let started = Instant::now();
    ensure!(second.rebuild(&scope)? == rows, "the second rebuild has another number of rows");
    let staged = speed(started);
    let copied = copy(site, 1, rows)?;

    let mut puller = Session::open(site, &user, "puller", true)?;
    site.give(OWNER, rows + 1, rows)?;
    site.say("pull pages");
    let started = Instant::now();
    let mut pulled = 0;
    loop {
        let page = puller.pull()?;
        pulled += page.ids.len() as i64;
        if !page.has_more {
            break;
        }
    }
    ensure!(pulled == rows, "the pull has {pulled} rows instead of {rows}");
    let pull = speed(started);
    let copied_again = copy(site, rows + 1, 2 * rows)?;

    let figure = |name: &str, ours, copy| {
        Figure::speed(format!("{name}, {rows} rows in pages of 1,000"), "rows/s", ours, ("COPY", copy), TARGET)
    };
    Ok(vec![
        figure("first rebuild of a scope", staging, copied),
        figure("next rebuild of a scope", staged, copied),
        figure("pull", pull, copied_again),
    ])
}

/// Rows a second of COPY to this process.
fn copy(site: &Site, first: i64, last: i64) -> anyhow::Result<f64> {
    let url = site.sandbox.source_url();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
        tokio::spawn(connection);
        let sql = format!("copy (select * from public.items where id between {first} and {last}) to stdout");
        let started = Instant::now();
        let stream = client.copy_out(&sql).await?;
        let octets = stream.try_fold(0, |octets, chunk| async move { Ok(octets + chunk.len()) }).await?;
        let elapsed = started.elapsed();
        ensure!(octets > 0, "COPY gave nothing");
        Ok((last - first + 1) as f64 / elapsed.as_secs_f64())
    })
}
