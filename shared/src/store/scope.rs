//! Interned scopes.

use std::collections::HashMap;

use deadpool_postgres::GenericClient;

use super::error::{Result, StoreError};
use super::statement;

/// Numbers of the given scopes, in their order; scopes that are new are made.
pub async fn intern(db: &impl GenericClient, scope_ids: &[&str]) -> Result<Vec<i32>> {
    if scope_ids.is_empty() {
        return Ok(Vec::new());
    }
    let sql = "-- scope::find\nselect scope_id, scope_no from tributary.scope where scope_id = any($1)";
    let mut known: HashMap<String, i32> = HashMap::with_capacity(scope_ids.len());
    for row in statement::query(db, sql, &[&scope_ids]).await? {
        known.insert(row.try_get(0)?, row.try_get(1)?);
    }
    // In one order everywhere, so that two writers never wait for each other.
    let mut missing: Vec<&str> = scope_ids.iter().copied().filter(|id| !known.contains_key(*id)).collect();
    missing.sort_unstable();
    missing.dedup();
    if !missing.is_empty() {
        let sql = "-- scope::intern
            insert into tributary.scope (scope_id)
            select unnest($1::text[])
            on conflict (scope_id) do update set scope_id = excluded.scope_id
            returning scope_id, scope_no";
        for row in statement::query(db, sql, &[&missing]).await? {
            known.insert(row.try_get(0)?, row.try_get(1)?);
        }
    }
    scope_ids
        .iter()
        .map(|id| known.get(*id).copied().ok_or_else(|| StoreError::integrity("a scope was not interned")))
        .collect()
}
