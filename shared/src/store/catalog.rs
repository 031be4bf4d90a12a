//! Reads the source's catalog, and lets PostgreSQL check the rules' expressions.

use std::collections::BTreeMap;

use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Error, Row, Transaction};

use crate::registry::catalog::{
    BaseType, Catalog, CatalogColumn, CatalogRelation, Collation, ColumnType, Persistence, PrimaryKey, RelationKind,
    ReplicaIdentity,
};
use crate::registry::{Problem, Registry, RelationName, SyncConfig, Table, Warning};

/// The catalog of those of the relations that exist, in the order asked for.
///
/// # Errors
/// The database answers with an error.
pub async fn load(client: &Client, relations: &[RelationName]) -> Result<Catalog, Error> {
    let schemas: Vec<&str> = relations.iter().map(RelationName::schema).collect();
    let names: Vec<&str> = relations.iter().map(RelationName::name).collect();
    let version = client
        .query_one("-- catalog::load version\nselect current_setting('server_version_num')::int4", &[])
        .await?
        .try_get::<_, i32>(0)?;
    let found = client.query(RELATIONS, &[&schemas, &names]).await?;
    let mut loaded = found.iter().map(relation).collect::<Result<Vec<CatalogRelation>, Error>>()?;
    let oids: Vec<u32> = loaded.iter().map(|relation| relation.oid).collect();
    let mut columns: BTreeMap<u32, Vec<CatalogColumn>> = BTreeMap::new();
    for row in client.query(COLUMNS, &[&oids]).await? {
        columns.entry(row.try_get("attrelid")?).or_default().push(column(&row)?);
    }
    for relation in &mut loaded {
        relation.columns = columns.get(&relation.oid).cloned().unwrap_or_default();
    }
    Ok(Catalog { server_version: version as u32, relations: loaded })
}

const RELATIONS: &str = "\
-- catalog::load relations
select
    wanted.schema,
    wanted.name,
    c.oid,
    c.relkind::text as kind,
    c.relpersistence::text as persistence,
    c.relreplident::text as replica_identity,
    k.indkey::int2[] as key_columns,
    k.indnkeyatts as key_width,
    not k.indimmediate as key_deferrable,
    i.indkey::int2[] as identity_columns,
    i.indnkeyatts as identity_width,
    row_security_active(c.oid) as row_security_applies,
    c.relkind = 'r' and exists (select from pg_catalog.pg_inherits h where h.inhparent = c.oid) as has_children,
    has_table_privilege(c.oid, 'select') as readable
from unnest($1::text[], $2::text[]) with ordinality as wanted (schema, name, number)
join pg_catalog.pg_namespace n on n.nspname = wanted.schema
join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = wanted.name
left join pg_catalog.pg_index k on k.indrelid = c.oid and k.indisprimary
left join pg_catalog.pg_index i on i.indrelid = c.oid and i.indisreplident
where c.relkind not in ('i', 'I', 't')
order by wanted.number";

const COLUMNS: &str = "\
-- catalog::load columns
with recursive layer as (
    select
        a.attrelid,
        a.attnum,
        a.atttypid as type_oid,
        a.atttypmod as modifier,
        a.attnotnull as not_null,
        0 as depth
    from pg_catalog.pg_attribute a
    where a.attrelid = any($1::oid[]) and a.attnum > 0 and not a.attisdropped
    union all
    select
        l.attrelid,
        l.attnum,
        t.typbasetype,
        case when l.modifier = -1 then t.typtypmod else l.modifier end,
        l.not_null or t.typnotnull,
        l.depth + 1
    from layer l
    join pg_catalog.pg_type t on t.oid = l.type_oid and t.typtype = 'd'
),
base as (
    select distinct on (attrelid, attnum) *
    from layer
    order by attrelid, attnum, depth desc
)
select
    a.attrelid,
    a.attnum,
    a.attname::text as name,
    a.atttypid as type_oid,
    a.atttypmod as modifier,
    b.type_oid as base_oid,
    b.modifier as base_modifier,
    b.not_null,
    a.attgenerated <> '' as generated,
    a.attidentity = 'a' as identity_always,
    t.typtype::text as type_kind,
    case when t.typcategory = 'A' then t.typelem else 0::oid end as element_oid,
    pg_catalog.format_type(b.type_oid, b.modifier) as formatted,
    c.collname::text as collation_name,
    c.oid = 100 as collation_is_default,
    c.collnamespace = 'pg_catalog'::regnamespace and c.collisdeterministic as collation_is_shared
from base b
join pg_catalog.pg_attribute a on a.attrelid = b.attrelid and a.attnum = b.attnum
join pg_catalog.pg_type t on t.oid = b.type_oid
left join pg_catalog.pg_collation c on c.oid = a.attcollation
order by a.attrelid, a.attnum";

fn relation(row: &Row) -> Result<CatalogRelation, Error> {
    let key_columns: Option<Vec<i16>> = row.try_get("key_columns")?;
    let identity_columns: Option<Vec<i16>> = row.try_get("identity_columns")?;
    // An index's INCLUDE columns follow its key.
    let width = |name: &str| row.try_get::<_, Option<i16>>(name).map(|width| width.unwrap_or(0) as usize);
    let (key_width, identity_width) = (width("key_width")?, width("identity_width")?);
    let deferrable = row.try_get::<_, Option<bool>>("key_deferrable")?.unwrap_or(false);
    Ok(CatalogRelation {
        name: RelationName::new(row.try_get::<_, String>("schema")?, row.try_get::<_, String>("name")?),
        oid: row.try_get("oid")?,
        kind: match row.try_get("kind")? {
            "r" => RelationKind::Table,
            "p" => RelationKind::PartitionedTable,
            "v" => RelationKind::View,
            "m" => RelationKind::MaterializedView,
            "f" => RelationKind::ForeignTable,
            _ => RelationKind::Other,
        },
        persistence: match row.try_get("persistence")? {
            "u" => Persistence::Unlogged,
            "t" => Persistence::Temporary,
            _ => Persistence::Permanent,
        },
        replica_identity: match row.try_get("replica_identity")? {
            "f" => ReplicaIdentity::Full,
            "i" => {
                ReplicaIdentity::Index(identity_columns.unwrap_or_default().into_iter().take(identity_width).collect())
            }
            "n" => ReplicaIdentity::Nothing,
            _ => ReplicaIdentity::Default,
        },
        primary_key: key_columns
            .map(|columns| PrimaryKey { columns: columns.into_iter().take(key_width).collect(), deferrable }),
        row_security_applies: row.try_get("row_security_applies")?,
        has_children: row.try_get("has_children")?,
        readable: row.try_get("readable")?,
        columns: Vec::new(),
    })
}

fn column(row: &Row) -> Result<CatalogColumn, Error> {
    let base_oid = row.try_get("base_oid")?;
    let base = BaseType {
        oid: base_oid,
        element_oid: row.try_get("element_oid")?,
        kind: row.try_get::<_, &str>("type_kind")?.chars().next().unwrap_or('b'),
        formatted: row.try_get("formatted")?,
    };
    let (sql, class) = base.in_our_sql();
    let collation_name: Option<String> = row.try_get("collation_name")?;
    let is_default = row.try_get::<_, Option<bool>>("collation_is_default")?.unwrap_or(true);
    let is_shared = row.try_get::<_, Option<bool>>("collation_is_shared")?.unwrap_or(true);
    Ok(CatalogColumn {
        name: row.try_get("name")?,
        attnum: row.try_get("attnum")?,
        type_info: ColumnType {
            oid: row.try_get("type_oid")?,
            modifier: row.try_get("modifier")?,
            base_oid,
            base_modifier: row.try_get("base_modifier")?,
            sql,
            class,
            collation: match collation_name {
                None => Collation::Default,
                Some(_) if is_default => Collation::Default,
                Some(name) if is_shared => Collation::Named(name),
                Some(_) => Collation::Foreign,
            },
        },
        not_null: row.try_get("not_null")?,
        generated: row.try_get("generated")?,
        identity_always: row.try_get("identity_always")?,
    })
}

/// Lets PostgreSQL check every rule's expressions: as an index on an empty temporary table, which takes immutable
/// expressions alone, and as the query that evaluates the rule. Everything is rolled back.
///
/// `registry` is the one that `config` resolved to.
///
/// # Errors
/// The database fails otherwise than by refusing an expression.
pub async fn check_expressions(
    client: &mut Client,
    config: &SyncConfig,
    registry: &Registry,
) -> Result<(Vec<Problem>, Vec<Warning>), Error> {
    let transaction = client.transaction().await?;
    // User-defined functions are not found, here as where rules are evaluated.
    transaction
        .batch_execute("-- catalog::check_expressions\nset local search_path = pg_catalog, pg_temp; savepoint rule")
        .await?;
    let tables_of = |from: &[i16]| from.iter().map(|number| registry.table(*number)).collect::<Option<Vec<&Table>>>();
    let mut checks = Vec::new();
    for (scope, rule) in config.scopes.iter().zip(&registry.rules) {
        let Some(tables) = tables_of(rule.from()) else { continue };
        let mut statements = rule.check_statements(&tables);
        if let ([table], false) = (tables.as_slice(), rule.has_joins()) {
            statements.push(format!(
                "-- catalog::check_expressions\nprepare tributary_check as\n{};\ndeallocate tributary_check",
                rule.sql(table).text
            ));
        }
        checks.push((scope.line, scope.rows.line, format!("rule {}", rule.scope), statements));
    }
    let queries = config.assignments.iter().filter_map(|assignment| Some((assignment, assignment.query.as_ref()?)));
    for ((config, query), assignment) in queries.zip(registry.assignments.queries()) {
        let Some(tables) = tables_of(assignment.from()) else { continue };
        let what = format!("assignment {}", config.scope.value);
        checks.push((query.line, query.line, what, assignment.check_statements(&tables)));
    }
    let mut problems = Vec::new();
    for (line, sql_line, what, statements) in checks {
        let refused = first_refusal(&transaction, &statements).await?;
        transaction.batch_execute("-- catalog::check_expressions\nrollback to savepoint rule").await?;
        match refused {
            None => {}
            Some((SqlState::INSUFFICIENT_PRIVILEGE | SqlState::READ_ONLY_SQL_TRANSACTION, message)) => {
                let message = format!("expressions of rules were not checked: {message}");
                return Ok((problems, vec![Warning { line, message }]));
            }
            Some((_, message)) => problems.push(Problem { line: sql_line, message: format!("{what}: {message}") }),
        }
    }
    transaction.rollback().await?;
    Ok((problems, Vec::new()))
}

/// What PostgreSQL says about the first statement that it refuses.
async fn first_refusal(
    transaction: &Transaction<'_>,
    statements: &[String],
) -> Result<Option<(SqlState, String)>, Error> {
    for statement in statements {
        if let Err(error) = transaction.batch_execute(statement).await {
            return match error.as_db_error() {
                Some(refusal) => Ok(Some((refusal.code().clone(), refusal.message().to_owned()))),
                None => Err(error),
            };
        }
    }
    Ok(None)
}
