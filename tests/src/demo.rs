//! A visible round trip on the sample application: rows written to PostgreSQL arrive at a client, digest by digest.

use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use indicatif::{ProgressBar, ProgressStyle};

use crate::canonical::hex;
use crate::client::Client;
use crate::database::Database;
use crate::expected;
use crate::ready::Ready;
use crate::sample::{self, ScopeContent};
use crate::secrets::bearer_token;

/// Rows on a page, so that a few pages are to be seen.
const PAGE: i64 = 200;
/// Tasks written before the client connects.
const TASKS: i64 = 3000;
/// Commits whose way to the client is timed.
const TIMED_COMMITS: usize = 20;
const PATIENCE: Duration = Duration::from_secs(30);

/// Run the round trip against a sandbox that runs the sample application, telling `out` what happens.
///
/// # Errors
/// Anything did not go as it must: an answer was not exact, a digest differed, a write did not arrive.
pub fn run(ready: &Ready, out: &mut impl Write) -> anyhow::Result<()> {
    let source = Database::connect(&ready.database_url)?;
    let puller = &ready.pullers.first().context("the sandbox has no puller")?.url;
    let marker = uuid::Uuid::new_v4().simple().to_string();
    let user = format!("demo_{}", &marker[..8]);

    writeln!(out, "1. Writing {TASKS} tasks of a new user to PostgreSQL")?;
    source.run(&format!(
        "begin;
         insert into users (id, name, email) values ('{user}', 'Demo', '{user}@example.org');
         insert into projects (name, owner_id) values ('Demo', '{user}');
         insert into members (project_id, user_id, role)
             select id, '{user}', 'owner' from projects where owner_id = '{user}';
         insert into tasks (project_id, assignee_id, title)
             select (select max(id) from projects where owner_id = '{user}'), '{user}', 'Demo task ' || n
             from generate_series(1, {TASKS}) n;
         commit"
    ))?;

    let token = bearer_token(&ready.jwt_secret, &user)?;
    let mut client = Client::new(puller, &token, &format!("demo-{marker}"));
    client.connect()?;
    let manifest = client.manifest()?;
    writeln!(
        out,
        "2. Connected: schema version {}, {} tables, assigned {} scopes",
        manifest.version,
        manifest.tables.len(),
        client.scopes.len()
    )?;

    writeln!(out, "3. Rebuilding each scope, {PAGE} rows a page")?;
    for scope in client.scopes_to_rebuild() {
        rebuild(&mut client, &source, &user, &scope, out)?;
    }

    let started = Instant::now();
    let task = format!("select id from tasks where assignee_id = '{user}' order by id limit 1");
    let id = source.text(&task)?;
    source.run(&format!(
        "begin;
         update tasks set title = 'Changed', progress = 0.25 where id = {id};
         update tasks set archived = true where assignee_id = '{user}' and id > {id} and id <= {id} + 100;
         insert into comments (task_id, author_id, body) values ({id}, '{user}', 'Hello');
         insert into documents (id, owner_id, title, body) values (gen_random_uuid(), '{user}', 'Notes', 'A document');
         commit"
    ))?;
    let bar = progress_bar(103, "pull");
    let changes = pull_until(&mut client, &bar, |client| {
        let tasks = client.contents(&format!("tasks_user:{user}"), "tasks");
        tasks.get(&id).and_then(|row| row.get("title")?.as_text()) == Some("Changed")
            && tasks.len() as i64 == TASKS - 100
    })?;
    writeln!(out, "4. Changed, archived and added rows: pulled {changes} changes in {:?}", started.elapsed())?;

    writeln!(out, "5. {TIMED_COMMITS} single commits, each pulled at once")?;
    let mut times = Vec::with_capacity(TIMED_COMMITS);
    for n in 0..TIMED_COMMITS {
        let title = format!("Timed {n}");
        source.execute("update tasks set title = $1 where id = $2::text::bigint", &[&title, &id])?;
        let committed = Instant::now();
        pull_until(&mut client, &ProgressBar::hidden(), |client| {
            let tasks = client.contents_of(&format!("tasks_user:{user}"), "tasks", &id);
            tasks.and_then(|row| row.get("title")?.as_text()) == Some(&title)
        })?;
        times.push(committed.elapsed());
    }
    times.sort_unstable();
    writeln!(
        out,
        "   commit to client: median {:?}, slowest {:?}",
        times[times.len() / 2],
        times.last().copied().unwrap_or_default()
    )?;

    writeln!(out, "6. Digests: the server's, the client's own of its rows, and the rows that SELECT gives")?;
    let page = client.pull_page(PAGE)?;
    let checksums = page.body.get("checksums").context("the last page was not the terminal one")?;
    for ScopeContent { scope, table, from } in sample::scopes(&source, &user)? {
        let digest = hex(&client.scope_digest(&scope)?);
        let server = checksums.get(&scope).and_then(|checksum| checksum.get("digest")?.as_text());
        if server != Some(&digest) {
            bail!("the digests of {table} differ");
        }
        let count = expected::compare(&client, &source, &scope, table, &from)?;
        writeln!(out, "   {scope:<28} {count:>5} rows  {}…  ok", &digest[..16])?;
    }
    writeln!(out, "All rows arrived and every digest was verified ({} pages).", client.pages)?;
    Ok(())
}

fn rebuild(
    client: &mut Client,
    source: &Database,
    user: &str,
    scope: &str,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    let known = sample::scopes(source, user)?.into_iter().find(|content| content.scope == scope);
    let from = known.context("a scope that is not of the sample application")?.from;
    let total = source.number(&format!("select count(*) from {from}"))?;
    let bar = progress_bar(total.unsigned_abs(), scope);
    let started = Instant::now();
    let mut rebuild = client.start_rebuild(scope, PAGE);
    let mut pages = 0;
    while !rebuild.finished {
        client.rebuild_page(&mut rebuild)?;
        pages += 1;
        bar.set_position(rebuild.row_count() as u64);
    }
    bar.finish_and_clear();
    let rows = client.rows.get(scope).map_or(0, crate::client::Rows::len);
    writeln!(out, "   {scope:<28} {rows:>5} rows  {pages:>3} pages  digest verified  {:?}", started.elapsed())?;
    Ok(())
}

fn pull_until(client: &mut Client, bar: &ProgressBar, arrived: impl Fn(&Client) -> bool) -> anyhow::Result<usize> {
    let deadline = Instant::now() + PATIENCE;
    let mut changes = 0;
    loop {
        let page = client.pull_page(PAGE)?;
        changes += page.changes;
        bar.set_position(changes as u64);
        if !page.has_more && arrived(client) {
            bar.finish_and_clear();
            return Ok(changes);
        }
        for scope in client.scopes_to_rebuild() {
            client.rebuild(&scope, PAGE)?;
        }
        if Instant::now() > deadline {
            bail!("a committed change did not arrive within {PATIENCE:?}");
        }
    }
}

fn progress_bar(total: u64, what: &str) -> ProgressBar {
    let bar = ProgressBar::new(total).with_message(what.to_owned());
    match ProgressStyle::with_template("   {msg:28} [{bar:40}] {pos}/{len} rows") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
