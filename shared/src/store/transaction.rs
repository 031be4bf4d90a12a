//! Transactions whose begin nobody waits for: what they read is sent right behind it, in one round trip.

use std::ops::Deref;

use deadpool_postgres::Object;

use super::error::Result;
use super::session::{self, Pool};

/// How a transaction reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isolation {
    /// One snapshot for all statements: a request.
    RepeatableRead,
    /// A snapshot for each statement.
    ReadCommitted,
}

/// A pooled session in a transaction of its own. Dropped before [`Self::commit`], it is rolled back behind the caller's
/// back, and the session returns to its pool after that.
pub struct Begun {
    session: Option<Object>,
    isolation: Isolation,
}

impl Begun {
    /// Takes a session for a transaction. The first statements are to be awaited together with [`Self::begin`], which
    /// goes before them: `try_join!(biased; db.begin(), ...)`.
    pub async fn acquire(pool: &Pool, isolation: Isolation) -> Result<Self> {
        Ok(Self { session: Some(session::acquire(pool).await?), isolation })
    }

    /// Begins the transaction.
    pub async fn begin(&self) -> Result<()> {
        let sql = match self.isolation {
            Isolation::RepeatableRead => "begin isolation level repeatable read",
            Isolation::ReadCommitted => "begin isolation level read committed",
        };
        Ok(self.batch_execute(sql).await?)
    }

    /// Commits. Every statement before must have been awaited: one that failed makes this a rollback.
    pub async fn commit(mut self) -> Result<()> {
        self.batch_execute("commit").await?;
        // Not dropped: the session goes back to the pool as it is.
        self.session.take();
        Ok(())
    }
}

impl Deref for Begun {
    type Target = Object;

    fn deref(&self) -> &Object {
        self.session.as_ref().expect("the session is there until the transaction has ended")
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            tokio::spawn(async move {
                if session.batch_execute("rollback").await.is_err() {
                    // Broken, or in an unknown state: not for anybody else.
                    drop(Object::take(session));
                }
            });
        }
    }
}
