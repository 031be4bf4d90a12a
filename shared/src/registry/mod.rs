//! What is synchronized: `sync.yaml`, checked against the source's catalog.
//!
//! A [`Registry`] is immutable and stored as JSON in the state; it says all that capture, projection, rules and
//! the manifest need. OIDs of relations are deliberately absent: the stream names relations.

pub mod catalog;
pub mod change;
pub mod config;
mod delivery;
pub mod name;
mod resolve;
mod yaml;

use std::collections::BTreeSet;
use std::fmt;
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

pub use self::catalog::{Catalog, ColumnType};
pub use self::config::SyncConfig;
use self::name::MAX_IDENTIFIER_OCTETS;
pub use self::name::{NameError, RelationName};
pub use self::resolve::at_risk;
pub use self::yaml::Located;
use crate::portable::PortableType;
use crate::rule::{Assignment, Rule};
use crate::template::{ScopeIdError, Template};

/// The schema of the projections.
const PROJECTION_SCHEMA: &str = "tributary_data";
/// Names that begin so are our own.
const RESERVED_PREFIX: &str = "tributary_";

/// What is wrong with a configuration, and on which line of `sync.yaml`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Problem {
    /// The line, from 1.
    pub line: usize,
    /// What is wrong.
    pub message: String,
}

/// What works but deserves a look, and on which line of `sync.yaml`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Warning {
    /// The line, from 1.
    pub line: usize,
    /// What deserves a look.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.message)
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.message)
    }
}

/// What is synchronized.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Registry {
    /// The tables, in the file's order.
    pub tables: Vec<Table>,
    /// The rules, in the file's order.
    pub rules: Vec<Rule>,
    /// Which scopes a user has.
    pub assignments: Assignments,
    /// The number of the next new table; numbers are never used twice.
    next_table_no: i16,
}

/// One table.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Table {
    /// Its number, kept across configurations.
    pub table_no: i16,
    /// The relation.
    pub relation: RelationName,
    /// Its logical table id.
    pub id: String,
    /// Read by rules, never delivered.
    pub capture_only: bool,
    /// The captured columns in `attnum` order: delivered ones, those that rules read, and the key.
    pub columns: Vec<Column>,
    /// The key in its own order, as indices of `columns`; one, but of a capture-only table.
    pub keys: Vec<usize>,
    /// Columns of a row's life, as indices of `columns`.
    pub lifecycle: Lifecycle,
}

/// Columns of a row's life, as indices of the table's columns.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Lifecycle {
    /// When it was made.
    pub created_at: Option<usize>,
    /// When it was last changed.
    pub updated_at: Option<usize>,
    /// When it was deleted.
    pub deleted_at: Option<usize>,
}

/// One captured column.
#[expect(clippy::struct_excessive_bools, reason = "independent facts of the catalog, the file and the rules")]
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Column {
    /// Its name.
    pub name: String,
    /// The field's id on the wire.
    pub field_id: String,
    /// Its type.
    pub type_info: ColumnType,
    /// What its values look like on the wire.
    pub portable: PortableType,
    /// It can be null.
    pub nullable: bool,
    /// Declared precision of a decimal.
    pub precision: Option<u32>,
    /// Declared scale of a decimal.
    pub scale: Option<i32>,
    /// Clients may write it.
    pub writable: bool,
    /// It is a field on the wire.
    pub delivered: bool,
    /// Rules or assignments read it: the projection keeps it as a typed column.
    pub stored: bool,
    /// Rules or assignments look rows up by it: the projection has an index on it.
    pub indexed: bool,
}

/// Which scopes a user has.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Assignments {
    /// The user's id is each value.
    templates: Vec<Template>,
    #[serde(default)]
    queries: Vec<Assignment>,
}

impl Registry {
    /// The table of this number.
    pub fn table(&self, table_no: i16) -> Option<&Table> {
        self.tables.iter().find(|table| table.table_no == table_no)
    }

    /// The table of this relation.
    pub fn table_of(&self, relation: &RelationName) -> Option<&Table> {
        self.tables.iter().find(|table| table.relation == *relation)
    }

    /// The rules that deliver rows of a table.
    pub fn rules_of(&self, table_no: i16) -> impl Iterator<Item = &Rule> {
        self.rules.iter().filter(move |rule| rule.table_no == table_no)
    }

    /// Whether a scope can hold rows of one of these tables, by their ids.
    ///
    /// By the rules and not by the entries: a client may hold rows that have left the scope since and whose delete markers
    /// compaction has taken, so that no entry of today knows of them. A scope whose rules differed then has another
    /// membership generation now, which makes its cursors stale by itself.
    pub fn can_hold(&self, scope_id: &str, table_ids: &BTreeSet<String>) -> bool {
        self.rules.iter().any(|rule| {
            let table = self.table(rule.table_no);
            table.is_some_and(|table| table_ids.contains(&table.id)) && rule.template().can_give(scope_id)
        })
    }
}

impl Column {
    /// Precision and scale as clients see them, both natural: `numeric(3, -2)` holds integers of up to five digits.
    /// A scale above the precision has no such form, and is not declared.
    pub fn decimal_bounds(&self) -> (Option<u32>, Option<u32>) {
        match (self.precision, self.scale) {
            (Some(precision), Some(scale)) => match u32::try_from(scale) {
                Ok(scale) if scale <= precision => (Some(precision), Some(scale)),
                Ok(_) => (None, None),
                Err(_) => (Some(precision + scale.unsigned_abs()), Some(0)),
            },
            (precision, _) => (precision, None),
        }
    }
}

impl Table {
    /// The key column, of a synced table.
    pub fn key_column(&self) -> &Column {
        &self.columns[self.keys[0]]
    }

    /// The table of the relation's projection.
    pub fn projection_name(&self) -> RelationName {
        projection_name(&self.relation)
    }
}

impl Assignments {
    pub(crate) fn new(templates: Vec<Template>, queries: Vec<Assignment>) -> Self {
        Self { templates, queries }
    }

    /// Assignments by a query, to be evaluated in the request's snapshot.
    pub fn queries(&self) -> &[Assignment] {
        &self.queries
    }

    /// The scopes of a user by assignments without a query: different ones, in raw UTF-8 order.
    ///
    /// # Errors
    /// The user id is too long for a scope id: no row can be in such a scope.
    pub fn scopes(&self, user_id: &str) -> Result<Vec<String>, ScopeIdError> {
        let mut scopes = BTreeSet::new();
        for template in &self.templates {
            scopes.extend(template.scope_id(&vec![Some(user_id); template.value_count()])?);
        }
        Ok(scopes.into_iter().collect())
    }
}

pub(crate) fn is_reserved(name: &str) -> bool {
    name.starts_with(RESERVED_PREFIX)
}

/// `<schema>.<relation>` in our own schema; where that is too long or could be another relation's, it is cut and
/// ends in a digest of both names.
fn projection_name(relation: &RelationName) -> RelationName {
    const DIGEST_OCTETS: usize = 8;
    // A tilde and two digits for each octet.
    const KEPT: usize = MAX_IDENTIFIER_OCTETS - 1 - 2 * DIGEST_OCTETS;
    let plain = format!("{}.{}", relation.schema(), relation.name());
    let ambiguous = [relation.schema(), relation.name()].iter().any(|part| part.contains(['.', '~']));
    if plain.len() <= MAX_IDENTIFIER_OCTETS && !ambiguous {
        return RelationName::new(PROJECTION_SCHEMA, plain);
    }
    let mut digest = Sha256::new();
    // No identifier holds a zero octet, so the pair is told apart.
    digest.update(relation.schema());
    digest.update([0]);
    digest.update(relation.name());
    let mut name: String =
        plain.char_indices().take_while(|(at, c)| at + c.len_utf8() <= KEPT).map(|(_, c)| c).collect();
    name.push('~');
    for octet in &digest.finalize()[..DIGEST_OCTETS] {
        let _ = write!(name, "{octet:02x}");
    }
    RelationName::new(PROJECTION_SCHEMA, name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn projection_names_fit_and_never_meet() {
        let name =
            |schema: &str, relation: &str| projection_name(&RelationName::new(schema, relation)).name().to_owned();
        assert_eq!(name("public", "documents"), "public.documents");
        let long = [
            name("public", &"a".repeat(63)),
            name("public", &format!("{}b", "a".repeat(62))),
            name("é", &"é".repeat(31)),
        ];
        let dotted = [name("a.b", "c"), name("a", "b.c"), name("a", "b~c")];
        let all: BTreeSet<&String> = long.iter().chain(&dotted).collect();
        assert_eq!(all.len(), 6);
        assert!(all.iter().all(|name| name.len() <= 63), "{all:?}");
    }

    #[test]
    fn a_users_scopes_are_sorted_and_different() {
        let template = |text: &str| Template::parse(text, |_| Ok::<(), ()>(())).expect(text).0;
        let assignments =
            Assignments::new(vec![template("z"), template("user:{u}"), template("user:{u}"), template("Z:é")], vec![]);
        assert_eq!(assignments.scopes("a:b"), Ok(vec!["Z:é".to_owned(), "user:a%3Ab".to_owned(), "z".to_owned()]));
        assert_eq!(assignments.scopes(&"x".repeat(251)), Err(ScopeIdError::TooLong));
        assert_eq!(Assignments::default().scopes("a"), Ok(vec![]));
    }
}
