//! Readiness: fail-closed, with the reason for operators.

use std::sync::{Arc, Mutex, PoisonError};

/// Whether a process can do its work, and why not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Readiness {
    /// It works; the text says as what (`leader`, `standby`, `serving`).
    Ready(String),
    /// It does not, for this reason: one line without values, keys or ids of users, clients and scopes.
    Unready(String),
}

/// The process's readiness, shared by the one who knows it and the admin port.
#[derive(Debug, Clone)]
pub struct Health {
    process: &'static str,
    state: Arc<Mutex<Inner>>,
}

#[derive(Debug)]
struct Inner {
    readiness: Readiness,
    broken: Option<String>,
}

impl Health {
    /// Not ready: the process (`materializer` or `puller`) is starting.
    pub fn new(process: &'static str) -> Self {
        let readiness = Readiness::Unready("starting".into());
        let health = Self { process, state: Arc::new(Mutex::new(Inner { readiness, broken: None })) };
        metrics::gauge!("tributary_integrity_failure").set(0.0);
        health.measure();
        health
    }

    fn measure(&self) {
        let ready = f64::from(u8::from(self.is_ready()));
        metrics::gauge!("tributary_ready", "process" => self.process).set(ready);
    }

    /// Sets the readiness; logs a change.
    pub fn set(&self, readiness: Readiness) {
        let mut inner = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if inner.readiness != readiness {
            match &readiness {
                Readiness::Ready(role) => tracing::info!(role, "ready"),
                Readiness::Unready(reason) => tracing::warn!(reason, "not ready"),
            }
            inner.readiness = readiness;
        }
        drop(inner);
        self.measure();
    }

    /// Ready as `role`.
    pub fn ready(&self, role: &str) {
        self.set(Readiness::Ready(role.into()));
    }

    /// Not ready for `reason`.
    pub fn unready(&self, reason: impl Into<String>) {
        self.set(Readiness::Unready(reason.into()));
    }

    /// Durable state is broken (ADR 003: `sync_integrity_failure` makes readiness unready): stays unready until the
    /// process is restarted, as nothing that it does itself can mend it.
    pub fn broken(&self, reason: impl Into<String>) {
        let reason = reason.into();
        let mut inner = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if inner.broken.is_none() {
            tracing::error!(reason, "integrity failure: unready until the state is mended and the process restarted");
            inner.broken = Some(reason);
        }
        drop(inner);
        metrics::gauge!("tributary_integrity_failure").set(1.0);
        self.measure();
    }

    /// Whether the process is ready now.
    pub fn is_ready(&self) -> bool {
        matches!(self.current(), Readiness::Ready(_))
    }

    /// The readiness as it is now.
    pub fn current(&self) -> Readiness {
        let inner = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match &inner.broken {
            Some(reason) => Readiness::Unready(format!("integrity failure: {reason}")),
            None => inner.readiness.clone(),
        }
    }
}
