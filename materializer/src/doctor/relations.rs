//! The relations that are synchronized, as the source has them now: drift, identity, row security, values at risk.

use std::collections::BTreeSet;

use tokio_postgres::Client;
use tributary_shared::portable::PortableType;
use tributary_shared::registry::catalog::{CatalogRelation, RelationKind, ReplicaIdentity};
use tributary_shared::registry::{Registry, RelationName, Table, at_risk};
use tributary_shared::store::{catalog, doctor};

use super::Report;

/// Examines the relations of the configuration that was given and of the one in force.
pub async fn examine(source: &Client, registries: &[Option<&Registry>], report: &mut Report) {
    let mut seen = BTreeSet::new();
    let tables: Vec<&Table> = registries
        .iter()
        .flatten()
        .flat_map(|registry| &registry.tables)
        .filter(|table| seen.insert(table.relation.clone()))
        .collect();
    if tables.is_empty() {
        return;
    }
    let names: Vec<RelationName> = tables.iter().map(|table| table.relation.clone()).collect();
    let found = catalog::load(source, &names).await.map_err(Into::into);
    let Some(found) = report.note("relations", found) else { return };
    let mut sound = 0;
    for table in &tables {
        let name = &table.relation;
        let relation = found.relations.iter().find(|relation| relation.name == *name);
        let before = report.findings.len();
        // What is in force is what the stream is held to.
        let in_force = registries
            .iter()
            .flatten()
            .last()
            .and_then(|registry| registry.tables.iter().find(|t| t.relation == *name));
        if let Some(drift) = drift(in_force.unwrap_or(table), relation) {
            let todo = "bring the table back in line, or adapt the configuration and run `materializer reset`; the stream stops at the next change of the table";
            report.problem("relations", "drift", format!("{name}: {drift}"), todo);
        }
        let Some(relation) = relation else { continue };
        if let Some(reason) = unidentified(relation) {
            let todo = format!(
                "ALTER TABLE {} REPLICA IDENTITY DEFAULT, with a primary key that is not deferrable",
                name.quoted()
            );
            report.problem(
                "relations",
                "no_identity",
                format!("{name} {reason}: updates and deletes name no row"),
                todo,
            );
        }
        if relation.row_security_applies {
            let what =
                format!("row-level security of {name} applies to this role: a baseline cannot read the whole table");
            report.problem(
                "relations",
                "row_security",
                what,
                "ALTER ROLE … BYPASSRLS for the materializer's role at the source",
            );
        }
        if report.findings.len() == before {
            sound += 1;
        }
        let risky: Vec<String> = table
            .columns
            .iter()
            .filter(|column| column.delivered)
            .filter_map(|column| Some(format!("{} ({})", column.name, at_risk(column.portable)?.trim_end_matches(','))))
            .collect();
        if !risky.is_empty() {
            let what = format!("{name} can hold values that stop the stream: {}", risky.join("; "));
            let todo = format!(
                "add CHECK constraints to the columns, or map them in the configuration: types: {{column: string}} under {name}"
            );
            report.advice("relations", "unrepresentable", what, todo);
        }
    }
    report.good("relations", "relations", format!("{sound} of {} relations are as configured", tables.len()));
    access(source, &names, report).await;
}

async fn access(source: &Client, names: &[RelationName], report: &mut Report) {
    let found = doctor::access(source, names).await;
    for access in report.note("privileges", found).into_iter().flatten() {
        if !access.readable {
            let relation = access.relation.quoted();
            let todo = format!(
                "GRANT USAGE ON SCHEMA … and GRANT SELECT ON {relation} to the materializer's role at the source (deploy/sql/roles.sql)"
            );
            report.problem("privileges", "unreadable", format!("this role may not read {}", access.relation), todo);
        }
    }
}

/// How a relation differs from the configuration that it is to follow; the stream finds the same when it meets it.
fn drift(table: &Table, relation: Option<&CatalogRelation>) -> Option<String> {
    let Some(relation) = relation else { return Some("the relation was dropped or renamed".to_owned()) };
    if !matches!(relation.kind, RelationKind::Table | RelationKind::PartitionedTable) {
        return Some("it is no table any more".to_owned());
    }
    for column in &table.columns {
        let Some(present) = relation.columns.iter().find(|present| present.name == column.name) else {
            return Some(format!("column {} was dropped or renamed", column.name));
        };
        if present.type_info.oid != column.type_info.oid {
            return Some(format!("column {} has another type: {}", column.name, present.type_info.sql));
        }
        if column.portable == PortableType::Decimal && present.type_info.modifier != column.type_info.modifier {
            return Some(format!("column {} has another precision or scale", column.name));
        }
        if column.delivered && !column.nullable && !present.not_null {
            return Some(format!("column {} can be null now", column.name));
        }
    }
    let key = relation.primary_key.as_ref()?;
    let names: BTreeSet<&str> = key
        .columns
        .iter()
        .filter_map(|attnum| relation.columns.iter().find(|column| column.attnum == *attnum))
        .map(|column| column.name.as_str())
        .collect();
    let configured: BTreeSet<&str> = table.keys.iter().map(|key| table.columns[*key].name.as_str()).collect();
    (names != configured).then(|| "its primary key has other columns".to_owned())
}

/// Why changes of a relation do not tell which row they are of.
fn unidentified(relation: &CatalogRelation) -> Option<&'static str> {
    let Some(key) = &relation.primary_key else { return Some("has no primary key") };
    if key.deferrable {
        return Some("has a deferrable primary key");
    }
    match &relation.replica_identity {
        ReplicaIdentity::Default | ReplicaIdentity::Full => None,
        ReplicaIdentity::Nothing => Some("has the replica identity NOTHING"),
        ReplicaIdentity::Index(index) => {
            let differs = index.iter().collect::<BTreeSet<_>>() != key.columns.iter().collect::<BTreeSet<_>>();
            differs.then_some("has a replica identity by other columns than its primary key")
        }
    }
}
