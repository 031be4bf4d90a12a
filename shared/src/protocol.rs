//! Protocol version 3 on the wire: what a request may be, and the exact shapes of the answers (ADR 003, "Pull
//! request rules" to "Rebuild response rules"; companion contract, sections 4 and 5).
//!
//! Requests: [`Envelope::read`], then one of its readers. Answers: [`PullResponse`], [`RebuildPage`],
//! [`ConnectResponse`]. Deliberately absent: HTTP, authentication, and every check that needs state.

mod answer;
mod identifier;
mod json;
mod request;

pub use answer::{
    Change, ConnectResponse, PullEnd, PullResponse, PullTail, RebuildEnd, RebuildPage, SchemaAction, UnsupportedSchema,
};
pub use identifier::{ClientId, InvalidRequest, PresentedToken, ScopeId};
pub use json::MAX_INTEGER;
pub use request::{ConnectRefusal, ConnectRequest, Envelope, PullRequest, RebuildRequest, SchemaReference};

/// The one protocol version that is spoken.
pub const PROTOCOL_VERSION: i64 = 3;
/// Most rows of a page.
pub const MAX_LIMIT: u16 = 1000;
