//! Assignments by a query: which scopes a user has, by a query over projections with `:user_id` and `:claims` whose output
//! columns are the values of the scope template.

use serde::{Deserialize, Serialize};
use sqlparser::ast::{SelectItem, Spanned};

use super::expression::{Named, ParsedExpression, Reference, SqlExpression, fold, offset};
use super::from::{self, FromClause, refuse};
use super::{SqlProblem, check_statements};
use crate::registry::Table;
use crate::template::Template;

/// An assignment's query as it was read, its names not yet looked up.
#[derive(Clone, PartialEq, Debug)]
pub struct AssignmentQuery {
    from: FromClause,
    outputs: Vec<(String, ParsedExpression)>,
    conditions: Vec<ParsedExpression>,
}

impl AssignmentQuery {
    /// Reads `SELECT column [, expression AS name] FROM table [JOIN … ON …] [WHERE …]`.
    ///
    /// # Errors
    /// The text is anything else; the problem names the position and the reason.
    pub fn parse(text: &str) -> Result<Self, SqlProblem> {
        let text = text.trim_end().strip_suffix(';').unwrap_or(text);
        let parsed = from::parse(text, true)?;
        let mut outputs: Vec<(String, ParsedExpression)> = Vec::new();
        for (number, item) in parsed.select.projection.iter().enumerate() {
            let at = item.span().start;
            let lost = || SqlProblem::at(at, "the parser lost a column's place".to_owned());
            let (tree, name) = match item {
                SelectItem::UnnamedExpr(tree) => (tree, None),
                SelectItem::ExprWithAlias { expr, alias } => (expr, Some(alias)),
                SelectItem::ExprWithAliases { .. } | SelectItem::QualifiedWildcard(..) | SelectItem::Wildcard(_) => {
                    return refuse(at, "an assignment selects columns by name, those that its scope names");
                }
            };
            let mut range = parsed.items.get(number).cloned().ok_or_else(lost)?;
            if let Some(alias) = name {
                let end = offset(text, alias.span.start).filter(|end| range.contains(end)).ok_or_else(lost)?;
                let written = text[range.start..end].trim_end();
                let at = written.len().saturating_sub(2);
                let word = |c: char| c.is_alphanumeric() || c == '_' || c == '$';
                let is_as = written.get(at..).is_some_and(|keyword| keyword.eq_ignore_ascii_case("as"))
                    && !written[..at].ends_with(word);
                range.end = range.start + if is_as { at } else { written.len() };
            }
            let expression = ParsedExpression::within(text, range, tree.clone(), Some(&parsed.parameters))?;
            let name = match name {
                Some(alias) => fold(alias),
                None => expression
                    .column_name()
                    .ok_or_else(|| SqlProblem::at(at, "an expression needs a name: expression AS name".to_owned()))?,
            };
            if outputs.iter().any(|(other, _)| *other == name) {
                return refuse(at, &format!("two columns are named {name}"));
            }
            outputs.push((name, expression));
        }
        Ok(Self { from: parsed.from, outputs, conditions: parsed.conditions })
    }

    /// The tables that the query reads.
    pub fn from(&self) -> &FromClause {
        &self.from
    }

    /// Whether an output column has this name.
    pub fn has_output(&self, name: &str) -> bool {
        self.outputs.iter().any(|(output, _)| output == name)
    }

    /// The columns that the query reads, as they are written.
    ///
    /// # Errors
    /// Names that cannot be of the query's tables.
    pub fn names(&self) -> Result<Vec<Named<'_>>, SqlProblem> {
        let mut names = Vec::new();
        for expression in self.conditions.iter().chain(self.outputs.iter().map(|(_, output)| output)) {
            names.extend(expression.names(&self.from)?);
        }
        Ok(names)
    }

    /// Columns that are looked up by equality.
    pub fn lookups(&self, tables: &[&Table]) -> Vec<(usize, usize)> {
        self.conditions.iter().flat_map(|condition| condition.lookups(&self.from, tables)).collect()
    }
}

/// An assignment by a query, ready to be evaluated.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Assignment {
    template: Template,
    /// The tables of FROM, by their numbers.
    from: Vec<i16>,
    /// The values of the template, in its order.
    values: Vec<SqlExpression>,
    conditions: Vec<SqlExpression>,
}

impl Assignment {
    /// The assignment of a query: `names` are the template's, `tables` those of FROM.
    ///
    /// # Errors
    /// Unknown columns, and columns that may not be asked what the query asks.
    pub fn bind(
        template: Template,
        names: &[String],
        query: &AssignmentQuery,
        tables: &[&Table],
    ) -> Result<Self, Vec<SqlProblem>> {
        let mut problems = Vec::new();
        let mut bind = |expression: &ParsedExpression| {
            expression.bind(&query.from, tables).map_err(|found| problems.extend(found)).ok()
        };
        let conditions: Vec<Option<SqlExpression>> = query.conditions.iter().map(&mut bind).collect();
        let output = |name: &String| query.outputs.iter().find(|(output, _)| output == name);
        let values: Vec<Option<SqlExpression>> =
            names.iter().filter_map(output).map(|(_, expression)| bind(expression)).collect();
        if !problems.is_empty() {
            return Err(problems);
        }
        Ok(Self {
            template,
            from: tables.iter().map(|table| table.table_no).collect(),
            values: values.into_iter().flatten().collect(),
            conditions: conditions.into_iter().flatten().collect(),
        })
    }

    /// The tables of FROM, by their numbers.
    pub fn from(&self) -> &[i16] {
        &self.from
    }

    /// What a combination of rows must meet.
    pub fn conditions(&self) -> &[SqlExpression] {
        &self.conditions
    }

    /// The values of the scope template.
    pub fn values(&self) -> &[SqlExpression] {
        &self.values
    }

    /// Whether the query reads `:claims`.
    pub fn reads_claims(&self) -> bool {
        self.conditions()
            .iter()
            .chain(self.values())
            .any(|expression| expression.references().any(|r| r == Reference::Claims))
    }

    /// The scope that a row of the query gives; `None` when a value is null, or the values fit no scope id: no row can
    /// be in such a scope.
    pub fn scope_of_values(&self, values: &[Option<&str>]) -> Option<String> {
        self.template.scope_id(values).ok().flatten()
    }

    /// Statements that make PostgreSQL itself check the expressions of the query.
    pub fn check_statements(&self, tables: &[&Table]) -> Vec<String> {
        check_statements(tables, &self.values, &self.conditions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outputs(text: &str) -> Vec<String> {
        AssignmentQuery::parse(text).expect(text).outputs.into_iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn reads_columns_and_named_expressions() {
        assert_eq!(outputs("SELECT project_id FROM members WHERE user_id = :user_id"), ["project_id"]);
        assert_eq!(
            outputs("select distinct m.a, lower(m.b || ', from') AS \"Low\", (:claims ->> 'org') c from m"),
            ["a", "Low", "c"]
        );
        assert_eq!(outputs("SELECT a as b, c FROM m JOIN n ON m.x = n.x AND n.u = :user_id;"), ["b", "c"]);
    }

    #[test]
    fn refuses_everything_else_with_position_and_reason() {
        for (text, expected) in [
            ("SELECT * FROM m", "line 1, column 8 of the SQL: an assignment selects columns by name"),
            ("SELECT a + 1 FROM m", "line 1, column 8 of the SQL: an expression needs a name"),
            ("SELECT a, b AS a FROM m", "two columns are named a"),
            ("SELECT a FROM m WHERE u = :user", "known are :user_id and :claims"),
            ("SELECT a FROM m WHERE u = $1", "parameters are not possible here"),
            ("SELECT a FROM m LEFT JOIN n ON true", "only inner joins"),
            ("SELECT max(a) AS a FROM m GROUP BY b", "GROUP BY and HAVING"),
            ("SELECT a FROM m WHERE u IN (SELECT 1)", "a subquery"),
        ] {
            let problem = AssignmentQuery::parse(text).expect_err(text).to_string();
            assert!(problem.contains(expected), "{text}: {problem}");
        }
    }
}
