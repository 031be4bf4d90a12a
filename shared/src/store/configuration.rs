//! Configurations in force and published manifests: immutable rows that [`super::progress`] points to.

use deadpool_postgres::GenericClient;

use super::error::{Result, StoreError};
use super::statement;
use crate::manifest::{Ancestry, Manifest};
use crate::registry::Registry;

/// A configuration with its manifest, as a puller or the materializer works with it.
#[derive(Debug, Clone)]
pub struct Configuration {
    /// Its number; progress names the one in force.
    pub configuration_no: i64,
    /// What is synchronized.
    pub registry: Registry,
    /// Version of the manifest.
    pub schema_version: u64,
    /// Hash of the manifest.
    pub schema_hash: [u8; 32],
    /// The manifest as it is sent on the wire.
    pub manifest_document: String,
}

/// Reads one configuration.
///
/// # Errors
/// [`StoreError::Integrity`] when it is missing or cannot be read, as progress pointed to it.
pub async fn load(db: &impl GenericClient, configuration_no: i64) -> Result<Configuration> {
    let row = statement::query_opt(
        db,
        "-- configuration::load
            select c.registry, m.schema_version, m.schema_hash, m.document
            from tributary.configuration c
            join tributary.manifest m on m.schema_version = c.schema_version
            where c.configuration_no = $1",
        &[&configuration_no],
    )
    .await?
    .ok_or_else(|| StoreError::integrity("the configuration in force is missing"))?;
    let registry: String = row.try_get(0)?;
    let hash: Vec<u8> = row.try_get(2)?;
    Ok(Configuration {
        configuration_no,
        registry: serde_json::from_str(&registry)
            .map_err(|e| StoreError::integrity(format!("configuration {configuration_no} cannot be read: {e}")))?,
        schema_version: row.try_get::<_, i64>(1)? as u64,
        schema_hash: hash.try_into().map_err(|_| StoreError::integrity("a schema hash is not 32 octets"))?,
        manifest_document: row.try_get(3)?,
    })
}

/// The newest published manifest, as its wire document.
pub async fn newest_manifest(db: &impl GenericClient) -> Result<Option<String>> {
    let row = statement::query_opt(
        db,
        "-- configuration::newest_manifest
            select document from tributary.manifest order by schema_version desc limit 1",
        &[],
    )
    .await?;
    Ok(row.map(|row| row.try_get(0)).transpose()?)
}

/// How many manifests are in memory at once while an ancestry is read: each can be large, and one is the usual number.
const ANCESTORS_AT_ONCE: i64 = 16;

/// The ancestry of a configuration's manifest.
///
/// # Errors
/// [`StoreError::Integrity`] when a published manifest cannot be read, or is not the one that its row says.
pub async fn ancestry(db: &impl GenericClient, configuration: &Configuration) -> Result<Ancestry> {
    let unreadable =
        |version: i64| StoreError::integrity(format!("the published manifest of version {version} cannot be read"));
    let mut below = configuration.schema_version as i64;
    let current = Manifest::from_json(&configuration.manifest_document).map_err(|_| unreadable(below))?;
    let mut ancestry = Ancestry::of(current);
    // Past the version that is awaited it cannot come any more.
    while ancestry.awaited().is_some_and(|parent| (parent.version as i64) < below) {
        let rows = statement::query(
            db,
            "-- configuration::ancestry
            select schema_version, document
            from tributary.manifest
            where schema_version < $1
            order by schema_version desc
            limit $2",
            &[&below, &ANCESTORS_AT_ONCE],
        )
        .await?;
        if rows.is_empty() {
            break;
        }
        for row in rows {
            below = row.try_get(0)?;
            let manifest = Manifest::from_json(row.try_get(1)?).map_err(|_| unreadable(below))?;
            ancestry.follow(manifest);
        }
    }
    Ok(ancestry)
}

/// Publishes a manifest (unless it is the one that is published already) and stores a configuration with it;
/// returns the configuration's number.
pub async fn store(db: &impl GenericClient, registry: &Registry, manifest: &Manifest) -> Result<i64> {
    let hash = *manifest.hash().octets();
    let document = manifest.to_json();
    let version = manifest.version() as i64;
    statement::execute(
        db,
        "-- configuration::store_manifest
        insert into tributary.manifest (schema_version, schema_hash, document)
        values ($1, $2, $3)
        on conflict (schema_version) do nothing",
        &[&version, &hash.as_slice(), &document],
    )
    .await?;
    let text = serde_json::to_string(registry)
        .map_err(|e| StoreError::integrity(format!("the configuration cannot be written: {e}")))?;
    let row = statement::query_one(
        db,
        "-- configuration::store
            insert into tributary.configuration (schema_version, registry)
            select schema_version, $3 from tributary.manifest where schema_version = $1 and schema_hash = $2
            returning configuration_no",
        &[&version, &hash.as_slice(), &text],
    )
    .await?;
    Ok(row.try_get(0)?)
}
