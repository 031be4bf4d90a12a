//! The independent client in Python, where its files are beside the checkout, against the same sandbox.

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use tributary_tests::canonical::hex;
use tributary_tests::client::Client;
use tributary_tests::sandbox::{Options, Sandbox};

use crate::sample::settle;

/// Syncs as one installation in three rounds and prints the digest of each scope.
const SCRIPT: &str = r"
import os, sys
from client import Client
client = Client(os.environ['PULLER'], os.environ['TOKEN'])
client.sync(limit=7)
client.sync(limit=1000)
for scope in sorted(client.scopes):
    print(scope, client.scope_digest(scope), len(client.rows.get(scope, {})))
";

/// Serves the naive model; each line on standard input is a few random transactions, answered by the scopes' digests.
const MODEL: &str = r"
import http.server, json, random, sys, threading
import canonical, model
n, rng = canonical.Number, random.Random(int(sys.argv[1]))
field = lambda name, kind: {'field_id': name, 'name': name, 'type': kind, 'nullable': name != 'id', 'writable': name != 'id'}
manifest = {'schema_version': n('1'), 'parent_schema': None, 'transition_class': 'initial', 'compatibility_floor': n('1'),
            'tables': [{'table_id': t, 'relation_id': t, 'name': t, 'composition': 'multi_scope', 'primary_key_field_id': 'id',
                        'lifecycle': dict.fromkeys(['created_at_field_id', 'updated_at_field_id', 'deleted_at_field_id']),
                        'fields': [field('id', 'int'), field('v', 'string'), field('f', 'float')], 'indexes': []} for t in ('b', 'a')]}
manifest['schema_hash'] = canonical.schema_hash(manifest)
model.Server.model, model.Server.scopes = model.Model(manifest), ['s1', 's2', 's3']
server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), model.Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_port, flush=True)
for _ in sys.stdin:
    for _ in range(rng.randrange(1, 4)):
        events = []
        for _ in range(rng.randrange(1, 8)):
            pk = n(str(rng.randrange(-10, 20)))
            row = None if rng.random() < 0.3 else {'id': pk, 'v': rng.choice([None, 'x', 'e\u0301\n']), 'f': n(canonical.es6_number((rng.random() + 0.5) * 10.0 ** rng.randrange(-3, 12)))}
            events.append((rng.choice('ab'), pk, row))
        on = [s for s in model.Server.scopes if rng.random() < 0.6]
        with model.Server.lock:
            model.Server.model.commit(events, lambda t, row: on)
    print(' '.join(model.Server.model.digest(s) for s in model.Server.scopes), flush=True)
";

fn oracle() -> Option<PathBuf> {
    let oracle = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/oracle");
    let found = oracle.join("client.py").is_file();
    if !found {
        eprintln!("skipped: no {}", oracle.display());
    }
    found.then_some(oracle)
}

#[test]
fn the_reference_client_follows_the_naive_model() -> anyhow::Result<()> {
    let Some(oracle) = oracle() else { return Ok(()) };
    for seed in 1..=5 {
        let mut server = Command::new("python3")
            .args(["-B", "-c", MODEL, &seed.to_string()])
            .env("PYTHONPATH", &oracle)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (Some(mut orders), Some(answers)) = (server.stdin.take(), server.stdout.take()) else { unreachable!() };
        let mut lines = BufReader::new(answers).lines();
        let port = lines.next().context("the model ended")??;
        let mut client = Client::new(&format!("http://127.0.0.1:{port}"), "none", "model");
        for round in 0..40 {
            writeln!(orders, "more")?;
            let digests = lines.next().context("the model ended")??;
            client.sync([1, 2, 3, 500][round % 4])?;
            let held = client
                .scopes
                .keys()
                .map(|scope| Ok(hex(&client.scope_digest(scope)?)))
                .collect::<anyhow::Result<Vec<_>>>()?;
            ensure!(held.join(" ") == digests, "seed {seed}, round {round}");
        }
        drop(orders);
        server.wait()?;
    }
    Ok(())
}

#[test]
fn the_python_oracle_agrees() -> anyhow::Result<()> {
    let Some(oracle) = oracle() else { return Ok(()) };
    let sandbox = Sandbox::start(Options::default())?;
    let source = sandbox.source()?;
    for user in ["u_1", "u_2", "u_3"] {
        source.run(&format!("update tasks set title = 'for {user}' where assignee_id = '{user}' and id % 2 = 0"))?;
        let mut client = sandbox.client(user, &format!("beside-oracle-{user}"))?;
        settle(&mut client, &source, user, 100)?;
        let output = Command::new("python3")
            .args(["-B", "-c", SCRIPT])
            .env("PYTHONPATH", &oracle)
            .env("PULLER", sandbox.pullers[0].url.as_deref().unwrap_or_default())
            .env("TOKEN", sandbox.token(user)?)
            .output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let printed = String::from_utf8(output.stdout)?;
        let mut expected = String::new();
        for scope in client.scopes.keys() {
            let rows = client.rows.get(scope).map_or(0, std::collections::BTreeMap::len);
            writeln!(expected, "{scope} {} {rows}", hex(&client.scope_digest(scope)?))?;
        }
        ensure!(printed == expected, "the oracle holds other rows:\n{printed}\n{expected}");
    }
    Ok(())
}
