"""Roles: with deploy/sql/{roles,grants}.sql each role may do what its process does, and is refused what is not its to do.

On a private PostgreSQL, with the migrations, and with the very statements of shared/src/store: each that a puller sends is
explained as a puller, which checks its privileges and changes nothing. Once with source and state apart, once in one
database.
"""

import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DEPLOY = Path(__file__).resolve().parent.parent
ROOT = DEPLOY.parent
STORE = ROOT / "shared/src/store"
# Modules of the store whose statements a puller sends, without those that only the materializer's housekeeping sends.
PULLER_MODULES = {"client", "digest", "pull", "scope", "snapshot"}
# Those that only the materializer sends, which owns the state.
MATERIALIZER_MODULES = {"catalog", "leader", "membership", "migrate", "progress", "projection", "quarantine", "reset", "retention",
    "server", "status", "write"}
# Those that both send, or that are sent to the source: named one by one.
MIXED_MODULES = {"assignment", "configuration", "doctor", "source"}
PULLER_MORE = {"progress::load", "leader::silence", "configuration::load", "configuration::ancestry", "migrate::is_migrated"}
HOUSEKEEPING = {"snapshot::collect_sessions", "snapshot::collect_snapshots"}
PULLER_SOURCE = {"source::accepted_epoch", "source::accepted_epochs_of"}
REPLICATION = {"source::server", "source::publication", "source::slot", "source::current_wal", "source::is_partitioned",
               "source::accepted_epochs", "source::snapshot_time", "doctor::settings", "doctor::clock", "doctor::access",
               "doctor::owns_publication"}
MATERIALIZER_MORE = {"doctor::settings", "doctor::clock", "doctor::state_refusals", "doctor::missing_indexes", "doctor::keys_in_use"}
TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
PROJECTION = 'tributary_data."public.documents"'


def unescaped(text):
    text = re.sub(r"\\\n\s*", "", text)
    return text.replace("\\n", "\n").replace('\\"', '"')


def statements():
    """Every named statement of the store: its name, and its text with placeholders filled in."""
    found = {}
    for path in sorted(STORE.glob("*.rs")):
        source = path.read_text()
        constants = {name: unescaped(text) for name, text in re.findall(r'const (\w+): &str = "((?:[^"\\]|\\.)*)"', source, re.DOTALL)}
        for text in map(unescaped, TEXT.findall(source)):
            name = re.match(r"-- (\w+::\w+)", text)
            if not name or "\n" not in text:
                continue
            text = re.sub(r"\{([A-Z_]+)\}", lambda match: constants.get(match.group(1), "0"), text)
            found[name.group(1)] = text.replace("{}", PROJECTION).replace("{{", "{").replace("}}", "}")
    return found


class Server:
    """A private PostgreSQL, without a port."""

    def __init__(self, folder):
        self.folder = folder
        bins = sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"), key=lambda path: int(path.split("/")[4]))
        self.bin = Path(shutil.which("initdb") or bins[-1]).parent
        self.as_user = []
        if os.geteuid() == 0:
            # PostgreSQL refuses to run as root.
            shutil.chown(folder, "postgres", "postgres")
            self.as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]

    def __enter__(self):
        self.run("initdb", "-D", f"{self.folder}/data", "-A", "trust", "-U", "postgres", "-E", "UTF8", "--locale=C", "--no-sync")
        options = f"-c listen_addresses= -c unix_socket_directories={self.folder} -c wal_level=logical -c fsync=off -c max_wal_senders=4"
        self.run("pg_ctl", "-D", f"{self.folder}/data", "-w", "-l", f"{self.folder}/log", "-o", options, "start")
        return self

    def __exit__(self, *_):
        self.run("pg_ctl", "-D", f"{self.folder}/data", "-m", "immediate", "-w", "stop")

    def run(self, program, *arguments):
        done = subprocess.run([*self.as_user, str(self.bin / program), *arguments], cwd="/", capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{program}: {done.stderr or done.stdout}")

    def psql(self, database, role, sql, *options, replication=False):
        """Runs statements; returns what went wrong, `` when nothing did."""
        address = f"host={self.folder} user={role} dbname={database}" + (" replication=database" if replication else "")
        command = [shutil.which("psql"), address, "-X", "-q", "-v", "ON_ERROR_STOP=1", "-v", "VERBOSITY=terse", *options]
        done = subprocess.run([*self.as_user, *command], input=sql, cwd="/", capture_output=True, text=True)
        return "" if done.returncode == 0 else done.stderr.strip()

    def each(self, database, role, texts):
        """Runs each text in a transaction that is rolled back; what went wrong with each."""
        script = "".join(f"\\warn @@{number}@@\nbegin;\n{sql};\nrollback;\ndeallocate all;\n" for number, sql in enumerate(texts))
        address = f"host={self.folder} user={role} dbname={database}"
        command = [shutil.which("psql"), address, "-X", "-q", "-v", "VERBOSITY=terse"]
        done = subprocess.run([*self.as_user, *command], input=script, cwd="/", capture_output=True, text=True)
        errors = re.split(r"@@\d+@@\n", done.stderr)[1:]
        assert len(errors) == len(texts), f"{role} on {database}: {done.stderr}"
        return [error.split("\n", 1)[0] for error in errors]

    def must(self, database, role, sql, *options):
        if error := self.psql(database, role, sql, *options):
            sys.exit(f"{role} on {database}: {error}")


def explained(name, sql):
    count = max([0, *map(int, re.findall(r"\$(\d+)", sql))])
    arguments = f"({', '.join(['null'] * count)})" if count else ""
    return f"prepare s as {sql};\n explain (costs off) execute s{arguments}"


class Layout:
    """The roles in their databases, made in the order that roles.sql tells."""

    def __init__(self, server, source, state):
        self.server, self.source, self.state = server, source, state
        for database in {source, state}:
            server.must("postgres", "postgres", f"create database {database}")
        server.must("postgres", "postgres", "create role app login") if server.psql("postgres", "app", "select") else None
        server.must(source, "postgres", "grant create on schema public to app")
        server.must(source, "app", "create table documents (id int primary key, title text); create table secrets (id int primary key)")
        # As an operator goes on; every step may be repeated.
        for _ in range(2):
            self.roles()
        for folder, database, role in (("state", state, "tributary_materializer"), ("source", source, "tributary_replication")):
            for migration in sorted((ROOT / "migrations" / folder).glob("*.sql")):
                server.must(database, role, migration.read_text())
        self.roles()
        for _ in range(2):
            server.must(state, "tributary_materializer", (DEPLOY / "sql/grants.sql").read_text(), "-v", "state=1")
            server.must(source, "tributary_replication", (DEPLOY / "sql/grants.sql").read_text(), "-v", "source=1")
        create = statements()["projection::create"].split("\n", 1)[1] + ")"
        server.must(state, "tributary_materializer", create)

    def roles(self):
        source = ["-v", "source=1", "-v", "tables=public.documents", "-v", "publish=tributary"]
        if self.source == self.state:
            self.server.must(self.source, "postgres", (DEPLOY / "sql/roles.sql").read_text(), *source, "-v", "state=1")
        else:
            self.server.must(self.source, "postgres", (DEPLOY / "sql/roles.sql").read_text(), *source)
            self.server.must(self.state, "postgres", (DEPLOY / "sql/roles.sql").read_text(), "-v", "state=1")

    def allowed(self):
        puller = {n: s for n, s in statements().items() if n.split("::")[0] in PULLER_MODULES} | {
            n: statements()[n] for n in PULLER_MORE
        }
        modules = {name.split("::")[0] for name in statements()}
        if unknown := modules - PULLER_MODULES - MATERIALIZER_MODULES - MIXED_MODULES:
            sys.exit(f"roles.py does not know who sends the statements of {sorted(unknown)}")
        for name, sql in puller.items():
            if name not in HOUSEKEEPING:
                yield self.state, "tributary_puller", name, explained(name, sql)
        for name in PULLER_SOURCE:
            yield self.source, "tributary_puller", name, explained(name, statements()[name])
        for name in REPLICATION:
            yield self.source, "tributary_replication", name, explained(name, statements()[name])
        for name in MATERIALIZER_MORE:
            yield self.state, "tributary_materializer", name, explained(name, statements()[name])
        yield self.source, "tributary_replication", "read a table", "select id, title from only public.documents"
        yield self.source, "tributary_replication", "check rules", "create temporary table tributary_check (id int)"
        yield self.state, "tributary_materializer", "write the state", "insert into tributary.scope (scope_id) values ('s')"
        yield self.state, "tributary_materializer", "make scratch tables", "create temporary table tributary_affected (id int)"
        yield self.state, "tributary_materializer", "read projections", f"select from {PROJECTION}"
        yield self.source, "writer", "accept a write", "select tributary.accept_write('u', 'c')"
        for table in ("progress", "leader", "quarantine", "configuration"):
            yield self.state, "watcher", table, f"select * from tributary.{table}"
        yield self.source, "watcher", "the slot", "select confirmed_flush_lsn from pg_replication_slots"

    def refused(self):
        puller, monitor = "tributary_puller", "watcher"
        for sql in (
            "update tributary.progress set boundary_lsn = 1",
            "update tributary.leader set epoch = 2",
            "insert into tributary.leader values (1, gen_random_uuid(), now(), 0)",
            "insert into tributary.scope_entry values (1, 1, 1, 1, 1::smallint, true)",
            "delete from tributary.scope_entry",
            "update tributary.scope set floor_lsn = 0",
            "update tributary.client set user_id = 'another'",
            "update tributary.client set retired = false",
            "delete from tributary.client",
            "update tributary.materialized_epoch set epoch = 9",
            "update tributary.snapshot_block set records = ''",
            "select from tributary.quarantine",
            f"update {PROJECTION} set tributary_wire = ''",
            "create table tributary.mine (id int)",
            "create schema mine",
        ):
            yield self.state, puller, sql
        for sql in ("select from public.documents", "select tributary.accept_write('u', 'c')", "update tributary.accepted_write set epoch = 1",
                    "create publication mine"):
            yield self.source, puller, sql
        for sql in ("insert into public.documents values (1)", "delete from public.documents", "select from public.secrets",
                    "alter table public.documents add column more text"):
            yield self.source, "tributary_replication", sql
        for sql in ("select from tributary.accepted_write", "insert into tributary.accepted_write values ('u', 'c', 1)", "create table tributary.mine (id int)"):
            yield self.source, "writer", sql
        for table in ("client", "client_scope", "scope", "scope_entry", "snapshot_block", "rebuild_session", "materialized_epoch"):
            yield self.state, monitor, f"select from tributary.{table}"
        yield self.state, monitor, f"select from {PROJECTION}"
        yield self.state, monitor, "update tributary.quarantine set resolved_at = now()"
        yield self.source, monitor, "select from public.documents"
        if self.source == self.state:
            yield self.state, "tributary_replication", "select from tributary.client"
            yield self.state, "tributary_replication", "update tributary.progress set boundary_lsn = 1"

    def problems(self):
        # A role's statements in a session of its own.
        sessions = {}
        for database, role, what, sql in self.allowed():
            sessions.setdefault((database, role), []).append((what, sql))
        for database, role, sql in self.refused():
            sessions.setdefault((database, role), []).append((None, sql))
        for (database, role), texts in sessions.items():
            for (what, sql), error in zip(texts, self.server.each(database, role, [sql for _, sql in texts])):
                refused = error.startswith("ERROR:  permission denied") or error.startswith("ERROR:  must be owner")
                if what and error:
                    yield f"{role} may not {what}: {error}"
                if not what and not refused:
                    yield f"{role} is not refused: {sql}: {error or 'it worked'}"
        slot = 'CREATE_REPLICATION_SLOT mine TEMPORARY LOGICAL pgoutput (SNAPSHOT \'nothing\')'
        if error := self.server.psql(self.source, "tributary_replication", slot, replication=True):
            yield f"tributary_replication may not make a slot: {error}"
        for role in ("tributary_puller", "tributary_materializer", "writer", "watcher"):
            if not self.server.psql(self.source, role, slot, replication=True):
                yield f"{role} may make a slot"
        # The publication is the administrator's, or the materializer's to keep where it may act for the tables' owner.
        publish = "create publication kept for table only public.documents"
        if not self.server.psql(self.source, "tributary_replication", publish):
            yield "tributary_replication publishes tables that are not its own"
        self.server.must(self.source, "postgres", "grant app to tributary_replication")
        if error := self.server.psql(self.source, "tributary_replication", publish):
            yield f"tributary_replication may not publish the owner's tables: {error}"
        self.server.must(self.source, "postgres", "revoke app from tributary_replication")


def main():
    with tempfile.TemporaryDirectory(prefix="tributary-roles-") as folder, Server(folder) as server:
        server.must("postgres", "postgres", "create role tributary_application; create role tributary_monitor; "
                    "create role writer login in role tributary_application; create role watcher login in role tributary_monitor")
        found, count = [], 0
        for source, state in (("source_db", "state_db"), ("one_db", "one_db")):
            layout = Layout(server, source, state)
            count += len(list(layout.allowed())) + len(list(layout.refused()))
            found += [f"{source}, {state}: {problem}" for problem in layout.problems()]
    if found:
        sys.exit("\n".join(found))
    print(f"roles: {count} statements, allowed or refused")


main()
