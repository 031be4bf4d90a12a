//! A blocking connection to PostgreSQL, for tests and the demonstration.

use std::time::Duration;

use anyhow::Context as _;
use tokio::runtime::{Builder, Runtime};
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, NoTls, Row, SimpleQueryMessage};

/// One session.
#[derive(Debug)]
pub struct Database {
    client: Client,
    runtime: Runtime,
}

impl Database {
    /// Connect to a `postgresql://` address.
    ///
    /// # Errors
    /// The server cannot be reached or refuses.
    pub fn connect(url: &str) -> anyhow::Result<Self> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let client = runtime.block_on(async {
            let connecting = tokio_postgres::connect(url, NoTls);
            let (client, connection) = tokio::time::timeout(Duration::from_secs(10), connecting).await??;
            tokio::spawn(connection);
            anyhow::Ok(client)
        })?;
        let database = Self { client, runtime };
        database.run("set timezone = 'UTC'")?;
        Ok(database)
    }

    /// Run statements without results.
    ///
    /// # Errors
    /// A statement failed; the message holds PostgreSQL's own.
    pub fn run(&self, sql: &str) -> anyhow::Result<()> {
        self.runtime.block_on(self.client.batch_execute(sql)).map_err(readable)
    }

    /// Run one statement; the number of rows it touched.
    ///
    /// # Errors
    /// The statement failed.
    pub fn execute(&self, sql: &str, params: &[&(dyn ToSql + Sync)]) -> anyhow::Result<u64> {
        self.runtime.block_on(self.client.execute(sql, params)).map_err(readable)
    }

    /// Run a query.
    ///
    /// # Errors
    /// The query failed.
    pub fn query(&self, sql: &str, params: &[&(dyn ToSql + Sync)]) -> anyhow::Result<Vec<Row>> {
        self.runtime.block_on(self.client.query(sql, params)).map_err(readable)
    }

    /// Run a query; each value as PostgreSQL's text.
    ///
    /// # Errors
    /// The query failed.
    pub fn texts(&self, sql: &str) -> anyhow::Result<Vec<Vec<Option<String>>>> {
        let messages = self.runtime.block_on(self.client.simple_query(sql)).map_err(readable)?;
        let rows = messages.into_iter().filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some((0..row.len()).map(|i| row.get(i).map(str::to_owned)).collect()),
            _ => None,
        });
        Ok(rows.collect())
    }

    /// The one value of a query, as text.
    ///
    /// # Errors
    /// The query failed, or its answer is not one value that is not null.
    pub fn text(&self, sql: &str) -> anyhow::Result<String> {
        let rows = self.texts(sql)?;
        rows.into_iter().next().and_then(|row| row.into_iter().next().flatten()).context("the query gave no value")
    }

    /// The one number of a query.
    ///
    /// # Errors
    /// As [`Self::text`], or the value is not an integer.
    pub fn number(&self, sql: &str) -> anyhow::Result<i64> {
        self.text(sql)?.parse().context("the query gave no integer")
    }
}

/// PostgreSQL's message instead of the driver's "db error".
fn readable(error: tokio_postgres::Error) -> anyhow::Error {
    match error.as_db_error().map(|db| format!("{} ({})", db.message(), db.code().code())) {
        Some(message) => anyhow::anyhow!(message),
        None => error.into(),
    }
}
