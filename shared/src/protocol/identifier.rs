//! Identifiers of requests. They are user data: their `Debug` shows none of them.

use std::fmt;

/// Most characters of an identifier.
const MAX_CHARS: usize = 255;

/// A request that is not of the protocol. It never tells where, so that nothing of the request comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("request is invalid")]
pub struct InvalidRequest;

fn checked(text: String) -> Result<String, InvalidRequest> {
    // PostgreSQL has no U+0000 in texts, so nothing that is stored is ever named with one.
    let valid = !text.is_empty() && text.chars().count() <= MAX_CHARS && !text.contains('\0');
    if valid { Ok(text) } else { Err(InvalidRequest) }
}

macro_rules! identifier {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(String);

        impl $name {
            /// An identifier: nonempty, at most 255 characters, without U+0000.
            pub fn parse(text: impl Into<String>) -> Result<Self, InvalidRequest> {
                checked(text.into()).map(Self)
            }

            /// Its text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({} octets)", stringify!($name), self.0.len())
            }
        }
    };
}

identifier!(
    /// A client of the authenticated user.
    ClientId
);
identifier!(
    /// A scope. Ordered by raw UTF-8, as all lists of scope ids are.
    ScopeId
);

/// A token as a request presents it: any text, trusted for nothing.
#[derive(Clone, PartialEq, Eq)]
pub struct PresentedToken(String);

impl PresentedToken {
    pub(super) fn new(text: String) -> Self {
        Self(text)
    }

    /// Its text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for PresentedToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PresentedToken({} octets)", self.0.len())
    }
}
