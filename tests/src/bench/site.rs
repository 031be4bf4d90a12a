//! What is measured: a sandbox with one table of 200-octet rows, a scope for each owner, and three scopes for a user.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use rustix::process::Signal;

use super::Options;
use crate::database::Database;
use crate::sandbox::{self, Sandbox};

/// The table of both sides. A row's values have 200 octets as PostgreSQL stores them.
pub(super) const TABLE: &str =
    "create table public.items (id bigint primary key, owner integer not null, body text not null)";
/// A row of [`TABLE`] from its id `g`.
const BODY: &str = "left(repeat(md5(g::text), 6), 184)";
/// Rows that no measurement asks for belong to this many owners.
const OWNERS: i64 = 100;
/// Scopes of every user beside the own one.
const SHARED: [&str; 2] = ["1000001", "1000002"];

/// Longest wait for what was written to arrive.
const PATIENCE: Duration = Duration::from_secs(300);
/// Pause between two looks at progress.
const POLL: Duration = Duration::from_millis(5);
/// What a program gets to stop.
const GRACE: Duration = Duration::from_secs(20);

/// A sandbox to measure.
pub(super) struct Site {
    pub sandbox: Sandbox,
    pub source: Database,
    state: Database,
    say: fn(&str),
    /// What the materializer is configured by, whenever it starts.
    _files: Files,
}

impl Site {
    pub fn start(options: &Options) -> anyhow::Result<Self> {
        let files = Files::write()?;
        let sandbox = Sandbox::start(sandbox::Options {
            config: Some(files.dir.join("sync.yaml")),
            schema: Some(vec![files.dir.join("schema.sql")]),
            pg_settings: ["fsync=on", "synchronous_commit=on", "shared_buffers=1GB"]
                .into_iter()
                .map(str::to_owned)
                .chain(options.pg_settings.iter().cloned())
                .collect(),
            split: options.split,
            cancelled: options.cancelled,
            ..sandbox::Options::default()
        })?;
        let (source, state) = (sandbox.source()?, sandbox.state()?);
        // The load is not what is measured.
        source.run("set synchronous_commit = off")?;
        Ok(Self { sandbox, source, state, say: options.say, _files: files })
    }

    pub fn materializer_pid(&self) -> u32 {
        self.sandbox.materializers[0].process.pid()
    }

    pub fn puller_pid(&self) -> u32 {
        self.sandbox.pullers[0].process.pid()
    }

    /// Where the puller serves clients, `host:port`.
    pub fn puller_address(&self) -> anyhow::Result<&str> {
        let url = self.sandbox.pullers[0].url.as_deref().context("a puller has an address")?;
        url.strip_prefix("http://").context("the puller's address is not http")
    }

    /// Stop the materializer: what is written from now on has to be drained.
    pub fn stop_materializer(&mut self) -> anyhow::Result<()> {
        let ended = self.sandbox.materializers[0].process.stop(Signal::TERM, GRACE);
        ensure!(ended, "the materializer did not stop by itself");
        Ok(())
    }

    /// Start it again, without waiting for anything.
    pub fn start_materializer(&mut self) -> anyhow::Result<()> {
        Ok(self.sandbox.materializers[0].process.restart()?)
    }

    /// The end of the source's WAL, in octets.
    pub fn wal_position(&self) -> anyhow::Result<i64> {
        self.source.number("select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint")
    }

    /// Wait until a transaction that committed after `position` is materialized.
    pub fn wait_until_materialized(&self, position: i64) -> anyhow::Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while self.state.number("select boundary_lsn from tributary.progress")? <= position {
            if Instant::now() > deadline {
                let words = self.sandbox.materializers[0].process.last_words();
                bail!("what was written is not materialized after {PATIENCE:?}: {words}");
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// Both sides begin with a clean buffer pool.
    pub fn checkpoint(&self) -> anyhow::Result<()> {
        self.source.run("checkpoint")
    }

    /// Insert rows `1..=rows`, `each` in a transaction. The position before the last transaction comes back: who has
    /// got past it has got everything.
    pub fn write(&self, rows: i64, each: i64) -> anyhow::Result<i64> {
        let each = each.min(rows);
        let last = rows - each;
        self.source.run(&format!(
            "do $$ begin
                for lowest in 1..{last} by {each} loop
                    insert into public.items
                    select g, g % {OWNERS}, {BODY} from generate_series(lowest, least(lowest + {each} - 1, {last})) g;
                    commit;
                end loop;
            end $$"
        ))?;
        let before = self.wal_position()?;
        self.insert(last + 1, rows, &format!("g % {OWNERS}"))?;
        self.flush()?;
        Ok(before)
    }

    /// Insert rows `1..=rows` at once.
    pub fn write_in_one_transaction(&self, rows: i64) -> anyhow::Result<()> {
        self.insert(1, rows, &format!("g % {OWNERS}"))?;
        self.flush()
    }

    /// Insert rows of one owner, 1,000 in a transaction, and wait until they are materialized.
    pub fn give(&self, owner: i64, first: i64, rows: i64) -> anyhow::Result<()> {
        let mut before = self.wal_position()?;
        let mut next = first;
        while next < first + rows {
            before = self.wal_position()?;
            let last = (next + 999).min(first + rows - 1);
            self.insert(next, last, &owner.to_string())?;
            next = last + 1;
        }
        self.flush()?;
        self.wait_until_materialized(before)
    }

    fn insert(&self, first: i64, last: i64, owner: &str) -> anyhow::Result<()> {
        self.source
            .run(&format!("insert into public.items select g, {owner}, {BODY} from generate_series({first}, {last}) g"))
    }

    /// Asynchronous commits reach the disk, and with it the stream.
    fn flush(&self) -> anyhow::Result<()> {
        self.source.run("begin; set local synchronous_commit = on; select txid_current(); commit")
    }

    pub fn say(&self, line: &str) {
        (self.say)(line);
    }
}

/// The configuration's files, removed with this.
struct Files {
    dir: PathBuf,
}

impl Drop for Files {
    fn drop(&mut self) {
        // Nobody reads them any more.
        let _ = fs::remove_dir_all(&self.dir);
    }
}

impl Files {
    fn write() -> anyhow::Result<Self> {
        let dir = std::env::temp_dir().join(format!("tributary-bench-{}", std::process::id()));
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let files = Self { dir };
        files.put("schema.sql", &format!("{TABLE};\n"))?;
        let shared = SHARED.map(|owner| format!("  - scope: \"owner:{owner}\"\n")).concat();
        files.put(
            "sync.yaml",
            &format!(
                "tables:\n  - relation: public.items\nscopes:\n  - scope: \"owner:{{owner}}\"\n    \
                 rows: SELECT * FROM items\nassignments:\n  - scope: \"owner:{{user_id}}\"\n{shared}"
            ),
        )?;
        Ok(files)
    }

    fn put(&self, name: &str, text: &str) -> anyhow::Result<()> {
        let path = self.dir.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }
}
