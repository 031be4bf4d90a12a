//! Pullers side by side: each serves the configuration that progress points to in its request's own snapshot, whatever it
//! served before.

use anyhow::ensure;
use tributary_tests::json::Json;
use tributary_tests::sandbox::{Options, Sandbox};

use super::super::pull::{accept, raw, send, texts};
use super::{action, answered, class_2, publish};

#[test]
fn every_puller_serves_the_configuration_that_progress_points_to() -> anyhow::Result<()> {
    let mut sandbox = Sandbox::start(Options { pullers: 3, ..Options::default() })?;
    let state = sandbox.state()?;
    let urls: Vec<String> = sandbox.pullers.iter().map(|puller| puller.url.clone().unwrap()).collect();
    let mut client = sandbox.client("u_1", "moving")?;
    client.sync(500)?;
    sandbox.materializers[0].process.kill();
    // The last puller has served nobody yet: it meets the new configuration as its first.
    for url in &urls[..2] {
        client.http.redirect(url);
        ensure!(action(&answered(&client, &client.connect_request())?) == "none");
        client.pull_all(500)?;
    }
    let former = state.number("select configuration_no from tributary.progress")?;
    publish(&state, class_2("tasks"))?;
    for url in &urls {
        client.http.redirect(url);
        let pulled = send(&client, "/sync/pull", raw(&client.pull_request(10)).as_bytes());
        ensure!(pulled == (422, "schema_mismatch".to_owned()), "{pulled:?}");
        ensure!(action(&answered(&client, &client.connect_request())?) == "replace");
    }
    let old = client.connect_request();
    client.connect()?;
    for url in urls.iter().rev() {
        client.http.redirect(url);
        ensure!(texts(&accept(&client, "/sync/pull", &client.pull_request(10))?, "rebuild").is_empty());
    }
    // Pointed back, every puller is back: it is the pointer that counts, and not what is newest.
    state.run(&format!("update tributary.progress set configuration_no = {former}"))?;
    for url in &urls {
        client.http.redirect(url);
        ensure!(action(&answered(&client, &old)?) == "none");
        let body = answered(&client, &client.connect_request())?;
        ensure!(action(&body) == "unsupported:unknown_schema_lineage", "a manifest is no ancestor of its parent");
        ensure!(body.get("schema").and_then(|schema| schema.get("version")) == Some(&Json::int(1)));
    }
    Ok(())
}
