//! Rules: which rows of a table are in which scopes.
//!
//! A rule is evaluated on captured rows, never on live tables: without SQL ([`Rule::native`]), by a query over arrays
//! of the columns' texts ([`Rule::sql`]), or, with the other rules of a table that has a rule with joins, by a query
//! over projections ([`crate::store::membership`]). All give the same scopes.
//!
//! Deliberately absent: an imitation of PostgreSQL's semantics. What is not plainly equality of texts goes to SQL.

mod assignment;
mod expression;
mod from;
mod native;
mod query;

use std::collections::BTreeSet;
use std::fmt;
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};
use sqlparser::tokenizer::Location;

pub use self::assignment::{Assignment, AssignmentQuery};
pub use self::expression::{Named, ParsedExpression, Reference, SqlExpression};
pub use self::from::FromClause;
use self::native::{NativeValue, Predicate};
pub use self::query::RuleQuery;
use crate::registry::Table;
use crate::registry::catalog::{Collation, ColumnType};
use crate::registry::name::quote_identifier;
use crate::template::{ScopeIdError, Template};

/// Why a text is not a rule's SQL, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct SqlProblem {
    line: u64,
    column: u64,
    message: String,
}

impl SqlProblem {
    pub(crate) fn at(location: Location, message: String) -> Self {
        Self { line: location.line, column: location.column, message }
    }
}

impl fmt::Display for SqlProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line == 0 {
            return f.write_str(&self.message);
        }
        write!(f, "line {}, column {} of the SQL: {}", self.line, self.column, self.message)
    }
}

/// A row that a rule cannot be evaluated on. Never names values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RuleError {
    /// The row has fewer columns than the rule's table.
    #[error("a row lacks a column that a rule reads")]
    MissingColumn,
    /// A boolean's text is neither `t` nor `f`.
    #[error("a boolean that a rule reads is neither t nor f")]
    NotABoolean,
    /// The values give no scope id.
    #[error(transparent)]
    ScopeId(#[from] ScopeIdError),
    /// A row is in more scopes than the rule's bound.
    #[error("a row is in more than {0} scopes of a rule")]
    TooManyScopes(u32),
}

/// A rule, ready to be evaluated.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Rule {
    /// The scope template as it was written.
    pub scope: String,
    /// The query as it was written.
    pub rows: String,
    /// The table whose rows the rule delivers.
    pub table_no: i16,
    /// A row that is in more scopes stops the stream.
    pub max_scopes_per_row: u32,
    /// The tables of FROM, by their numbers.
    from: Vec<i16>,
    /// The one of them whose rows are delivered.
    target: usize,
    template: Template,
    values: Vec<SqlExpression>,
    conditions: Vec<SqlExpression>,
    native: Option<NativeParts>,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct NativeParts {
    filter: Predicate,
    values: Vec<NativeValue>,
}

/// A rule that needs no SQL.
#[derive(Clone, Copy, Debug)]
pub struct NativeRule<'a> {
    template: &'a Template,
    parts: &'a NativeParts,
}

/// A rule as a query over captured rows.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RuleSql {
    /// The columns (indices of the table's) whose texts the query takes, in parameter order.
    pub columns: Vec<usize>,
    /// Takes `$1::int4[]`, ordinals of the rows, and one `text[]` for each of [`Self::columns`]; answers
    /// `ordinal int4` of each row that the filter lets through, and one text for each value of the scope template.
    ///
    /// Runs with `search_path = pg_catalog`, ISO dates and the session defaults of text output that
    /// the stream was read with.
    pub text: String,
}

/// A rule's parts as they were read.
#[derive(Clone, Copy, Debug)]
pub struct RuleSource<'a> {
    /// The scope template as it was written.
    pub scope: &'a str,
    /// The query as it was written.
    pub rows: &'a str,
    /// The bound of scopes for a row.
    pub max_scopes_per_row: u32,
    /// The scope template.
    pub template: &'a Template,
    /// Its values.
    pub values: &'a [ParsedExpression],
    /// The query.
    pub query: &'a RuleQuery,
}

impl Rule {
    /// Looks the rule's columns up in its tables, one for each of FROM.
    ///
    /// # Errors
    /// Unknown columns, and columns that may not be asked what the rule asks.
    pub fn bind(source: RuleSource<'_>, tables: &[&Table]) -> Result<Self, Vec<SqlProblem>> {
        let from = source.query.from();
        let mut problems = Vec::new();
        let mut bind =
            |expression: &ParsedExpression| expression.bind(from, tables).map_err(|found| problems.extend(found)).ok();
        let conditions: Vec<Option<SqlExpression>> = source.query.conditions().iter().map(&mut bind).collect();
        let values: Vec<Option<SqlExpression>> = source.values.iter().map(&mut bind).collect();
        if !problems.is_empty() {
            return Err(problems);
        }
        let native = match (tables, source.query.conditions()) {
            ([table], []) => Some((table, Some(Predicate::Constant(Some(true))))),
            ([table], [filter]) => Some((table, native::filter(filter.tree(), from, table))),
            _ => None,
        };
        let native = native.and_then(|(table, filter)| {
            let values: Option<Vec<NativeValue>> =
                source.values.iter().map(|value| native::value(value, from, table)).collect();
            filter.zip(values).map(|(filter, values)| NativeParts { filter, values })
        });
        let target = source.query.target();
        Ok(Self {
            scope: source.scope.to_owned(),
            rows: source.rows.to_owned(),
            table_no: tables[target].table_no,
            max_scopes_per_row: source.max_scopes_per_row,
            from: tables.iter().map(|table| table.table_no).collect(),
            target,
            template: source.template.clone(),
            values: values.into_iter().flatten().collect(),
            conditions: conditions.into_iter().flatten().collect(),
            native,
        })
    }

    /// The tables of FROM, by their numbers.
    pub fn from(&self) -> &[i16] {
        &self.from
    }

    /// The one of FROM whose rows are delivered.
    pub fn target(&self) -> usize {
        self.target
    }

    /// Whether rows of other tables, or other rows of its own, have a say.
    pub fn has_joins(&self) -> bool {
        self.from.len() > 1
    }

    /// What a combination of rows must meet.
    pub fn conditions(&self) -> &[SqlExpression] {
        &self.conditions
    }

    /// The values of the scope template.
    pub fn values(&self) -> &[SqlExpression] {
        &self.values
    }

    /// The columns of the rule's only table that it reads, ascending.
    pub fn columns(&self) -> Vec<usize> {
        let expressions = self.conditions.iter().chain(&self.values);
        let columns = expressions.flat_map(SqlExpression::columns).map(|(_, column)| column);
        columns.collect::<BTreeSet<usize>>().into_iter().collect()
    }

    /// The rule without SQL, if it can be.
    pub fn native(&self) -> Option<NativeRule<'_>> {
        self.native.as_ref().map(|parts| NativeRule { template: &self.template, parts })
    }

    /// The rule as a query over texts; `table` is the only one that it was bound to.
    pub fn sql(&self, table: &Table) -> RuleSql {
        let columns = self.columns();
        let mut text = String::from("-- rule::scopes\nselect\n    r.ordinal");
        for (number, value) in self.values.iter().enumerate() {
            // The line break ends a comment at the expression's end.
            let _ = write!(text, ",\n    ({}\n    )::text as value_{number}", value.render(column_name));
        }
        text.push_str("\nfrom (\n    select\n        a.ordinal");
        for index in &columns {
            let _ = write!(text, ",\n        {} as c{index}", typed(*index, &table.columns[*index].type_info));
        }
        text.push_str("\n    from unnest($1::int4[]");
        for parameter in 0..columns.len() {
            let _ = write!(text, ", ${}::text[]", parameter + 2);
        }
        text.push_str(") as a (ordinal");
        for index in &columns {
            let _ = write!(text, ", c{index}");
        }
        text.push_str(")\n) as r");
        if let Some(filter) = self.conditions.first() {
            let _ = write!(text, "\nwhere ({}\n)", filter.render(column_name));
        }
        RuleSql { columns, text }
    }

    /// The scope id that the values of a query's row give; `None` when one is null.
    ///
    /// # Errors
    /// The values give no scope id.
    pub fn scope_id(&self, values: &[Option<&str>]) -> Result<Option<String>, RuleError> {
        Ok(self.template.scope_id(values)?)
    }

    /// Checks the number of scopes that the rule gives one row.
    ///
    /// # Errors
    /// The number is past the rule's bound.
    pub fn check_bound(&self, scopes: usize) -> Result<(), RuleError> {
        let within = u32::try_from(scopes).is_ok_and(|scopes| scopes <= self.max_scopes_per_row);
        if within { Ok(()) } else { Err(RuleError::TooManyScopes(self.max_scopes_per_row)) }
    }

    /// The scope template.
    pub fn template(&self) -> &Template {
        &self.template
    }

    /// Statements for an empty database that make PostgreSQL itself check the rule's expressions; `tables` are those
    /// of FROM.
    pub fn check_statements(&self, tables: &[&Table]) -> Vec<String> {
        check_statements(tables, &self.values, &self.conditions)
    }
}

/// Statements that make PostgreSQL itself check expressions: an index takes immutable ones alone, without subqueries
/// and aggregates. One table stands for all of FROM, as what is checked is about a combination of their rows.
fn check_statements(tables: &[&Table], values: &[SqlExpression], conditions: &[SqlExpression]) -> Vec<String> {
    let name = |reference| match reference {
        Reference::Column(table, column) => format!("t{table}_c{column}"),
        Reference::UserId => "user_id".to_owned(),
        Reference::Claims => "claims".to_owned(),
    };
    let read: BTreeSet<Reference> = values.iter().chain(conditions).flat_map(SqlExpression::references).collect();
    let columns: Vec<String> = read
        .into_iter()
        .map(|reference| match reference {
            Reference::Column(table, column) => {
                let type_info = &tables[table].columns[column].type_info;
                format!("{} {}{}", name(reference), type_info.sql, collate(type_info))
            }
            Reference::UserId => "user_id text".to_owned(),
            Reference::Claims => "claims jsonb".to_owned(),
        })
        .collect();
    let conditions: Vec<String> =
        conditions.iter().map(|condition| format!("({}\n)", condition.render(name))).collect();
    let filter = if conditions.is_empty() { String::new() } else { format!("\nwhere {}", conditions.join(" and ")) };
    let create = format!("-- rule::check_statements\ncreate temporary table tributary_check ({})", columns.join(", "));
    let constant = ["1".to_owned()];
    let values: Vec<String> = values.iter().map(|value| value.render(name)).collect();
    let index = |value: &String| {
        format!("-- rule::check_statements\ncreate index on tributary_check ((({value}\n)::text)){filter}")
    };
    let indexed = if values.is_empty() { constant.as_slice() } else { values.as_slice() };
    std::iter::once(create).chain(indexed.iter().map(index)).collect()
}

impl NativeRule<'_> {
    /// The scope of a row of PostgreSQL's text output, one text for each of the table's columns; `None`: no scope.
    /// Columns that the rule does not read are not looked at.
    ///
    /// # Errors
    /// The row cannot be evaluated.
    pub fn scope(&self, row: &[Option<&str>]) -> Result<Option<String>, RuleError> {
        if self.parts.filter.evaluate(row)? != Some(true) {
            return Ok(None);
        }
        let values = self.parts.values.iter().map(|value| value.text(row)).collect::<Result<Vec<_>, _>>()?;
        Ok(self.template.scope_id(&values)?)
    }
}

/// The name of a column of the only table in [`Rule::sql`].
fn column_name(reference: Reference) -> String {
    match reference {
        Reference::Column(_, column) => format!("r.c{column}"),
        Reference::UserId | Reference::Claims => "null".to_owned(),
    }
}

/// A column of texts as its own type.
fn typed(index: usize, type_info: &ColumnType) -> String {
    format!("a.c{index}::{}{}", type_info.sql, collate(type_info))
}

/// The collation of a column in our own SQL, when it is not the default.
pub(crate) fn collate(type_info: &ColumnType) -> String {
    match &type_info.collation {
        Collation::Named(name) => format!(" collate pg_catalog.{}", quote_identifier(name)),
        Collation::Default | Collation::Foreign => String::new(),
    }
}

#[cfg(test)]
mod tests;
