//! Connect: one test for each row of the contract's dispatch, and the cursor bridge.
//!
//! Later manifests are put in force as the materializer would do it, in one transaction: published, with the digests that
//! bind it, and pointed to by progress.

#![expect(clippy::unwrap_used, reason = "a test that cannot read an answer has failed")]

mod bridge;
mod dispatch;
mod side_by_side;

use std::collections::BTreeMap;

use anyhow::ensure;
use tributary_shared::manifest::{Manifest, Table};
use tributary_shared::position::Position;
use tributary_shared::registry::Registry;
use tributary_shared::seal::RowSeal;
use tributary_tests::canonical;
use tributary_tests::client::Client;
use tributary_tests::database::Database;
use tributary_tests::json::Json;

use super::pull::{raw, with};

const TASKS: &str = "tasks_user:u_1";
const COMMENTS: &str = "comments_user:u_1";
const TEMPLATES: &str = "templates_public";

/// Publishes a manifest with other tables and puts it in force. Nobody may be writing: the materializer is stopped.
fn publish(state: &Database, change: impl FnOnce(&mut Vec<Table>)) -> anyhow::Result<()> {
    let current = state.text(
        "select m.document
        from tributary.progress p
        join tributary.configuration c using (configuration_no)
        join tributary.manifest m using (schema_version)",
    )?;
    let current = Manifest::from_json(&current)?;
    let mut tables = current.tables().to_vec();
    change(&mut tables);
    let next = current.successor(tables)?.expect("the tables differ");
    let document = canonical::Manifest::parse(&Json::parse(next.to_json().as_bytes())?)?;
    state.run("begin")?;
    let sql = "insert into tributary.manifest (schema_version, schema_hash, document) values ($1, $2, $3)";
    state.execute(sql, &[&(next.version() as i64), &next.hash().octets().as_slice(), &next.to_json()])?;
    let registry: Registry = serde_json::from_str(&state.text(
        "select c.registry from tributary.progress p join tributary.configuration c using (configuration_no)",
    )?)?;
    for table in registry.tables.iter().filter(|table| document.tables.contains_key(&table.id)) {
        bind_digests(state, table, &document)?;
    }
    state.run(&format!(
        "with made as (
            insert into tributary.configuration (schema_version, registry)
            select {}, c.registry from tributary.progress p join tributary.configuration c using (configuration_no)
            returning configuration_no
        )
        update tributary.progress set configuration_no = (select configuration_no from made);
        commit",
        next.version()
    ))
}

/// Gives a table's captured rows the digests that bind a manifest. Rows that do not fit it any more keep theirs.
fn bind_digests(
    state: &Database,
    table: &tributary_shared::registry::Table,
    manifest: &canonical::Manifest,
) -> anyhow::Result<()> {
    let projection = table.projection_name().quoted();
    let rows = state.query(
        &format!(
            "select tributary_row_id, tributary_key, tributary_version_lsn, tributary_version_ordinal, tributary_wire
            from {projection} where tributary_wire is not null"
        ),
        &[],
    )?;
    let (mut ids, mut digests, mut seals) = (Vec::new(), Vec::new(), Vec::new());
    for row in rows {
        let (id, key, wire): (i64, Vec<u8>, String) = (row.try_get(0)?, row.try_get(1)?, row.try_get(4)?);
        let version = Position::from_sql(row.try_get(2)?, row.try_get(3)?)?;
        let json = Json::parse(wire.as_bytes())?;
        let Ok(digest) = manifest.row_digest(&table.id, &json, &version.server_version()) else { continue };
        ids.push(id);
        seals.push(RowSeal::new(id, table.table_no, &key, version, &digest, &wire).0.to_vec());
        digests.push(digest.to_vec());
    }
    let sql = format!(
        "update {projection} p set tributary_digest = u.digest, tributary_seal = u.seal
        from unnest($1::bigint[], $2::bytea[], $3::bytea[]) as u (id, digest, seal)
        where p.tributary_row_id = u.id"
    );
    state.execute(&sql, &[&ids, &digests, &seals])?;
    Ok(())
}

/// Another field of a table is not writable any more: class 2.
fn class_2(table_id: &'static str) -> impl FnOnce(&mut Vec<Table>) {
    move |tables| {
        let table = tables.iter_mut().find(|table| table.table_id == table_id).unwrap();
        let key = table.primary_key_field_id.clone();
        table.fields.iter_mut().find(|field| field.writable && field.field_id != key).unwrap().writable = false;
    }
}

/// A table has another name: class 3.
fn class_3(table_id: &'static str) -> impl FnOnce(&mut Vec<Table>) {
    move |tables| {
        let table = tables.iter_mut().find(|table| table.table_id == table_id).unwrap();
        table.name.push_str("_renamed");
    }
}

/// A table goes: class 4.
fn class_4(table_id: &'static str) -> impl FnOnce(&mut Vec<Table>) {
    move |tables| tables.retain(|table| table.table_id != table_id)
}

/// Sends a connect; status and body.
fn ask(client: &Client, request: &Json) -> anyhow::Result<(u16, Json)> {
    let response = client.http.post("/sync/connect", raw(request).as_bytes())?;
    Ok((response.status, Json::parse(&response.body)?))
}

/// The code of an error answer, with its status.
fn refusal(client: &Client, request: &Json) -> anyhow::Result<(u16, String)> {
    let (status, body) = ask(client, request)?;
    Ok((status, body.get("error").unwrap().get("code").and_then(Json::as_text).unwrap().to_owned()))
}

/// A connect that is answered.
fn answered(client: &Client, request: &Json) -> anyhow::Result<Json> {
    let (status, body) = ask(client, request)?;
    ensure!(status == 200, "{status} {}", raw(&body));
    Ok(body)
}

/// The action of an answer, with its reason after a colon.
fn action(body: &Json) -> String {
    let schema = body.get("schema").unwrap();
    let text = |name: &str| schema.get(name).and_then(Json::as_text);
    text("reason")
        .map_or_else(|| text("action").unwrap().to_owned(), |reason| format!("{}:{reason}", text("action").unwrap()))
}

/// The cursor updates of an answer.
fn updates(body: &Json) -> BTreeMap<String, Option<String>> {
    let updates = body.get("scope_cursor_updates").and_then(Json::as_object).unwrap();
    updates.iter().map(|(scope, cursor)| (scope.clone(), cursor.as_text().map(str::to_owned))).collect()
}

/// A connect that asks for a reset.
fn reset(client: &Client) -> Json {
    with(&client.connect_request(), &["schema_reset"], Json::Bool(true))
}

/// The manifest of an answer is the current one, and is there exactly when the client has to take it.
fn defines(body: &Json) -> Option<(i64, String)> {
    let manifest = canonical::Manifest::parse(body.get("schema_definition")?).unwrap();
    Some((manifest.version, manifest.hash))
}

fn reference(body: &Json) -> (i64, String) {
    let schema = body.get("schema").unwrap();
    (
        schema.get("version").and_then(Json::as_int).unwrap(),
        schema.get("hash").and_then(Json::as_text).unwrap().to_owned(),
    )
}
