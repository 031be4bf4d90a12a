//! SQL expressions of rules: read by a parser, but never rewritten from its tree. The text that PostgreSQL gets is
//! the author's own, with only the column names replaced, so that PostgreSQL's grammar decides what it means.

use std::collections::BTreeSet;
use std::ops::{ControlFlow, Range};

use serde::{Deserialize, Serialize};
use sqlparser::ast::{
    AccessExpr, ArrayElemTypeDef, BinaryOperator, CastKind, DataType, Expr, Ident, InTarget, ObjectName,
    ObjectNamePart, Query, Spanned, Value, Visit, Visitor, visit_expressions,
};
use sqlparser::dialect::PostgreSqlDialect;
use sqlparser::parser::{Parser, ParserError};
use sqlparser::tokenizer::{Location, Token, TokenWithSpan, Tokenizer};

use super::SqlProblem;
use super::from::FromClause;
use crate::registry::catalog::{Collation, TypeClass};
use crate::registry::{Column, Table};

/// An expression as it was read, its columns not yet looked up.
#[derive(Clone, PartialEq, Debug)]
pub struct ParsedExpression {
    text: String,
    range: Range<usize>,
    tree: Expr,
    columns: Vec<ColumnReference>,
    parameters: Vec<(Range<usize>, Reference)>,
    /// Offsets of columns that are only compared with labels, tested for null or taken as text.
    text_only: BTreeSet<usize>,
    /// Offsets of columns of which only equality is asked, or less.
    equality_only: BTreeSet<usize>,
}

/// A column as an expression names it.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct ColumnReference {
    range: Range<usize>,
    path: Vec<String>,
    at: Location,
}

/// What stands in an expression in place of a value.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reference {
    /// A column: the index of its table in FROM, and its index in that table.
    Column(usize, usize),
    /// `:user_id`, of an assignment.
    UserId,
    /// `:claims`, of an assignment.
    Claims,
}

/// An expression over the columns of a query's tables, ready to stand in a query.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SqlExpression {
    parts: Vec<SqlPart>,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum SqlPart {
    Text(String),
    Reference(Reference),
}

impl SqlExpression {
    /// The SQL text, with `name` naming what it refers to.
    pub fn render(&self, name: impl Fn(Reference) -> String) -> String {
        self.parts
            .iter()
            .map(|part| match part {
                SqlPart::Text(text) => text.clone(),
                SqlPart::Reference(reference) => name(*reference),
            })
            .collect()
    }

    /// What the expression refers to.
    pub fn references(&self) -> impl Iterator<Item = Reference> {
        self.parts.iter().filter_map(|part| match part {
            SqlPart::Reference(reference) => Some(*reference),
            SqlPart::Text(_) => None,
        })
    }

    /// The columns that the expression reads: table of FROM, column of the table.
    pub fn columns(&self) -> impl Iterator<Item = (usize, usize)> {
        self.references().filter_map(|reference| match reference {
            Reference::Column(table, column) => Some((table, column)),
            Reference::UserId | Reference::Claims => None,
        })
    }
}

impl ParsedExpression {
    /// Reads a text that is one expression.
    ///
    /// # Errors
    /// It is not, or holds what no rule may hold.
    pub fn parse(text: &str) -> Result<Self, SqlProblem> {
        let tokens = tokenize(text)?;
        let mut parser = Parser::new(&PostgreSqlDialect {}).with_tokens_with_locations(tokens);
        let tree = parser.parse_expr().map_err(|error| parser_problem(&error))?;
        let next = parser.peek_token();
        if next.token != Token::EOF {
            return Err(SqlProblem::at(next.span.start, format!("unexpected {}", next.token)));
        }
        Self::within(text, 0..text.len(), tree, None)
    }

    /// The expression that stands in this range of `text`, read before as `tree`; `parameters` are those of the whole
    /// text, `None` where none may stand.
    pub(crate) fn within(
        text: &str,
        range: Range<usize>,
        tree: Expr,
        parameters: Option<&[(Range<usize>, Reference)]>,
    ) -> Result<Self, SqlProblem> {
        let parameters = parameters
            .map(|all| all.iter().filter(|(place, _)| range.contains(&place.start)).cloned().collect::<Vec<_>>());
        let mut survey = Survey {
            text,
            columns: Vec::new(),
            parameters: parameters.as_ref().map(|_| 0),
            text_only: BTreeSet::new(),
            equality_only: BTreeSet::new(),
        };
        if let ControlFlow::Break(problem) = tree.visit(&mut survey) {
            return Err(problem);
        }
        // A value that is taken as it is, is taken as its text.
        let whole = survey.bare(&tree);
        survey.text_only.extend(whole);
        let Survey { mut columns, parameters: met, text_only, equality_only, .. } = survey;
        let parameters = parameters.unwrap_or_default();
        if met.unwrap_or(0) != parameters.len() {
            let message = "a parameter stands where the parser does not expect one; known are :user_id and :claims";
            return Err(SqlProblem::at(tree.span().start, message.to_owned()));
        }
        columns.sort_by_key(|column| column.range.start);
        Ok(Self { text: text.to_owned(), range, tree, columns, parameters, text_only, equality_only })
    }

    pub(crate) fn tree(&self) -> &Expr {
        &self.tree
    }

    /// The columns as they are written: the table of FROM, when the name tells it, and the name.
    pub(crate) fn names<'a>(&'a self, from: &FromClause) -> Result<Vec<Named<'a>>, SqlProblem> {
        self.columns.iter().map(|column| column.named(from)).collect()
    }

    /// The expression over these tables' columns, one table for each of FROM; every problem is reported.
    pub(crate) fn bind(&self, from: &FromClause, tables: &[&Table]) -> Result<SqlExpression, Vec<SqlProblem>> {
        let mut problems = Vec::new();
        let mut found: Vec<(Range<usize>, Reference)> = self.parameters.clone();
        for column in &self.columns {
            match column.place(from, tables) {
                Ok((table, index)) => {
                    if let Some(reason) = self.refusal(column.range.start, &tables[table].columns[index]) {
                        problems.push(SqlProblem::at(column.at, reason));
                    }
                    found.push((column.range.clone(), Reference::Column(table, index)));
                }
                Err(problem) => problems.push(problem),
            }
        }
        if !problems.is_empty() {
            return Err(problems);
        }
        found.sort_by_key(|(range, _)| range.start);
        let mut parts = Vec::new();
        let mut position = self.range.start;
        for (range, reference) in found {
            parts.push(SqlPart::Text(self.text[position..range.start].to_owned()));
            parts.push(SqlPart::Reference(reference));
            position = range.end;
        }
        parts.push(SqlPart::Text(self.text[position..self.range.end].to_owned()));
        Ok(SqlExpression { parts })
    }

    /// Why a column may not be asked what is asked of it here.
    fn refusal(&self, offset: usize, column: &Column) -> Option<String> {
        let name = &column.name;
        let text_only = self.text_only.contains(&offset);
        let equality_only = text_only || self.equality_only.contains(&offset);
        match (column.type_info.class, &column.type_info.collation) {
            (TypeClass::Enum, _) if !equality_only => Some(format!(
                "column {name} is an enum: a rule may compare it with literals by =, <> and IN, test it for null, or cast it to text"
            )),
            (TypeClass::Composite, _) => Some(format!("column {name} has a composite type: a rule may not read it")),
            (TypeClass::Opaque, _) if !text_only => Some(format!(
                "column {name} has a type that is kept as text: a rule may test it for null or cast it to text"
            )),
            (_, Collation::Foreign) if !text_only => Some(format!(
                "column {name} has a collation that another database cannot follow: a rule may test it for null or use it in a scope"
            )),
            _ => None,
        }
    }

    /// The column of a query's only table, when the expression is nothing else.
    pub(crate) fn bare_column(&self, from: &FromClause, table: &Table) -> Option<usize> {
        column_of(&self.tree).and_then(|path| {
            let reference = ColumnReference { range: 0..0, path, at: Location::empty() };
            reference.place(from, &[table]).ok().map(|(_, column)| column)
        })
    }

    /// The last part of the name, when the expression is nothing but a column.
    pub(crate) fn column_name(&self) -> Option<String> {
        column_of(&self.tree).and_then(|path| path.last().cloned())
    }

    /// Columns that are looked up by equality: a condition that must hold compares them with columns of another table
    /// or with a parameter.
    pub(crate) fn lookups(&self, from: &FromClause, tables: &[&Table]) -> Vec<(usize, usize)> {
        let mut found = Vec::new();
        lookups(&self.tree, from, tables, &mut found);
        found
    }
}

fn lookups(tree: &Expr, from: &FromClause, tables: &[&Table], found: &mut Vec<(usize, usize)>) {
    let place = |path| ColumnReference { range: 0..0, path, at: Location::empty() }.place(from, tables).ok();
    match tree {
        Expr::Nested(inner) => lookups(inner, from, tables, found),
        Expr::BinaryOp { left, op: BinaryOperator::And, right } => {
            lookups(left, from, tables, found);
            lookups(right, from, tables, found);
        }
        Expr::BinaryOp { left, op: BinaryOperator::Eq, right } => {
            for (column, with) in [(left, right), (right, left)] {
                let Some((table, index)) = column_of(column).and_then(place) else { continue };
                let mut other = false;
                let _: ControlFlow<()> = visit_expressions(with.as_ref(), |part| {
                    other |= matches!(part, Expr::Value(value) if matches!(value.value, Value::Placeholder(_)));
                    other |= matches!(part, Expr::Identifier(_) | Expr::CompoundIdentifier(_))
                        && column_of(part).and_then(place).is_some_and(|(of, _)| of != table);
                    ControlFlow::Continue(())
                });
                if other {
                    found.push((table, index));
                }
            }
        }
        _ => {}
    }
}

/// A column as it is written.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Named<'a> {
    /// The table of FROM, when the name tells it.
    pub table: Option<usize>,
    /// The column's own name.
    pub name: &'a str,
    /// Where it stands.
    pub at: Location,
}

impl ColumnReference {
    fn named(&self, from: &FromClause) -> Result<Named<'_>, SqlProblem> {
        let written = self.path.join(".");
        let Some((name, prefix)) = self.path.split_last() else {
            return Err(SqlProblem::at(self.at, "a column has no name".to_owned()));
        };
        if prefix.is_empty() {
            return Ok(Named { table: (from.len() == 1).then_some(0), name, at: self.at });
        }
        match from.matching(prefix).as_slice() {
            [table] => Ok(Named { table: Some(*table), name, at: self.at }),
            [] if from.len() == 1 => {
                Err(SqlProblem::at(self.at, format!("{written} is not a column of the rule's table")))
            }
            [] => Err(SqlProblem::at(self.at, format!("{written} is not a column of a table of FROM"))),
            _ => Err(SqlProblem::at(self.at, format!("{written} is a column of several tables of FROM"))),
        }
    }

    fn place(&self, from: &FromClause, tables: &[&Table]) -> Result<(usize, usize), SqlProblem> {
        let Named { table, name, at } = self.named(from)?;
        let places: Vec<(usize, usize)> = tables
            .iter()
            .enumerate()
            .filter(|(index, _)| table.is_none_or(|table| table == *index))
            .filter_map(|(index, table)| {
                table.columns.iter().position(|column| column.name == name).map(|column| (index, column))
            })
            .collect();
        match places.as_slice() {
            [place] => Ok(*place),
            [] => Err(SqlProblem::at(at, format!("column {name} does not exist"))),
            _ => Err(SqlProblem::at(at, format!("column {name} is of several tables: write its table too"))),
        }
    }
}

/// The path of a bare column, parentheses aside.
pub(crate) fn column_of(tree: &Expr) -> Option<Vec<String>> {
    match tree {
        Expr::Identifier(ident) => Some(vec![fold(ident)]),
        Expr::CompoundIdentifier(idents) => Some(idents.iter().map(fold).collect()),
        Expr::Nested(inner) => column_of(inner),
        _ => None,
    }
}

/// A name as PostgreSQL folds it.
pub(crate) fn fold(ident: &Ident) -> String {
    if ident.quote_style.is_some() { ident.value.clone() } else { ident.value.to_ascii_lowercase() }
}

/// Tokens of a text, refusing what would not be a constant text of one expression.
pub(crate) fn tokenize(text: &str) -> Result<Vec<TokenWithSpan>, SqlProblem> {
    let tokens = Tokenizer::new(&PostgreSqlDialect {}, text)
        .tokenize_with_location()
        .map_err(|error| SqlProblem::at(error.location, error.message))?;
    for token in &tokens {
        let refused = match &token.token {
            Token::Placeholder(_) => "parameters are not possible here",
            Token::SemiColon => "unexpected ;",
            Token::Word(word) if word.quote_style.is_some_and(|quote| quote != '"') => "names are quoted by \" only",
            _ => continue,
        };
        return Err(SqlProblem::at(token.span.start, refused.to_owned()));
    }
    Ok(tokens)
}

/// The parameters of a text, by their places.
pub(crate) fn parameters(text: &str, tokens: &[TokenWithSpan]) -> Vec<(Range<usize>, Reference)> {
    let mut found = Vec::new();
    for pair in tokens.windows(2) {
        let (Token::Colon, Token::Word(word)) = (&pair[0].token, &pair[1].token) else { continue };
        let reference = match word.value.as_str() {
            "user_id" if word.quote_style.is_none() => Reference::UserId,
            "claims" if word.quote_style.is_none() => Reference::Claims,
            _ => continue,
        };
        let Some(start) = offset(text, pair[0].span.start) else { continue };
        found.push((start..start + 1 + word.value.len(), reference));
    }
    found
}

/// What the parser says, its position taken out of the message.
pub(crate) fn parser_problem(error: &ParserError) -> SqlProblem {
    let message = match error {
        ParserError::TokenizerError(message) | ParserError::ParserError(message) => message.as_str(),
        ParserError::RecursionLimitExceeded => "the expression is nested too deeply",
    };
    let position = message.rsplit_once(" at Line: ").and_then(|(message, position)| {
        let (line, column) = position.split_once(", Column: ")?;
        Some((message, Location::new(line.parse().ok()?, column.parse().ok()?)))
    });
    let (message, location) = position.unwrap_or((message, Location::empty()));
    SqlProblem::at(location, message.to_owned())
}

/// The octet at which a position of the parser (lines and characters from 1) stands.
pub(crate) fn offset(text: &str, location: Location) -> Option<usize> {
    let line = usize::try_from(location.line).ok()?.checked_sub(1)?;
    let column = usize::try_from(location.column).ok()?.checked_sub(1)?;
    let start = if line == 0 { 0 } else { text.match_indices('\n').nth(line - 1)?.0 + 1 };
    text[start..].char_indices().map(|(at, _)| start + at).chain([text.len()]).nth(column)
}

/// One walk over a tree: collects columns, refuses what no rule may hold.
struct Survey<'a> {
    text: &'a str,
    columns: Vec<ColumnReference>,
    /// Parameters that were met; `None` where none may stand.
    parameters: Option<usize>,
    text_only: BTreeSet<usize>,
    equality_only: BTreeSet<usize>,
}

impl Survey<'_> {
    fn refuse(at: Location, message: &str) -> ControlFlow<SqlProblem> {
        ControlFlow::Break(SqlProblem::at(at, message.to_owned()))
    }

    fn column(&mut self, idents: &[Ident]) -> ControlFlow<SqlProblem> {
        let Some((first, last)) = idents.first().zip(idents.last()) else { return ControlFlow::Continue(()) };
        let at = first.span.start;
        let range = offset(self.text, at).zip(self.end(last));
        let Some((start, end)) = range else { return Self::refuse(at, "the parser lost a column's place") };
        self.columns.push(ColumnReference { range: start..end, path: idents.iter().map(fold).collect(), at });
        ControlFlow::Continue(())
    }

    /// The octet after a name.
    fn end(&self, ident: &Ident) -> Option<usize> {
        let start = offset(self.text, ident.span.start)?;
        let written = match ident.quote_style {
            None => ident.value.clone(),
            Some(_) => crate::registry::name::quote_identifier(&ident.value),
        };
        self.text[start..].starts_with(&written).then_some(start + written.len())
    }

    /// Where a bare column begins.
    fn bare(&self, tree: &Expr) -> Option<usize> {
        column_of(tree)?;
        let mut inner = tree;
        while let Expr::Nested(next) = inner {
            inner = next;
        }
        offset(self.text, inner.span().start)
    }

    fn compared(&mut self, column: &Expr, with: &Expr) {
        if matches!(with, Expr::Value(value) if matches!(value.value, Value::SingleQuotedString(_) | Value::Null)) {
            self.equality_only.extend(self.bare(column));
        }
    }
}

impl Visitor for Survey<'_> {
    type Break = SqlProblem;

    fn pre_visit_query(&mut self, query: &Query) -> ControlFlow<SqlProblem> {
        Self::refuse(query.span().start, "a subquery in an expression is not supported")
    }

    fn pre_visit_relation(&mut self, relation: &ObjectName) -> ControlFlow<SqlProblem> {
        Self::refuse(relation.span().start, "a table in an expression is not supported")
    }

    fn pre_visit_expr(&mut self, tree: &Expr) -> ControlFlow<SqlProblem> {
        match tree {
            Expr::Value(value) if matches!(value.value, Value::Placeholder(_)) => match &mut self.parameters {
                Some(met) => {
                    *met += 1;
                    ControlFlow::Continue(())
                }
                None => Self::refuse(value.span.start, "parameters are not possible here"),
            },
            Expr::Identifier(ident) => self.column(std::slice::from_ref(ident)),
            Expr::CompoundIdentifier(idents) => self.column(idents),
            Expr::CompoundFieldAccess { access_chain, .. }
                if access_chain.iter().any(|access| matches!(access, AccessExpr::Dot(_))) =>
            {
                Self::refuse(tree.span().start, "fields of composite values are not supported")
            }
            Expr::IsNull(inner) | Expr::IsNotNull(inner) => {
                self.text_only.extend(self.bare(inner));
                ControlFlow::Continue(())
            }
            Expr::Cast { kind, expr, data_type, .. } => {
                if matches!(data_type, DataType::Text) && matches!(kind, CastKind::Cast | CastKind::DoubleColon) {
                    self.text_only.extend(self.bare(expr));
                }
                if is_foreign(data_type) {
                    return Self::refuse(tree.span().start, "a cast to a user-defined type is not supported");
                }
                ControlFlow::Continue(())
            }
            Expr::BinaryOp { left, op, right } => {
                if matches!(op, BinaryOperator::Eq | BinaryOperator::NotEq) {
                    self.compared(left, right);
                    self.compared(right, left);
                }
                match op {
                    BinaryOperator::PGCustomBinaryOperator(path)
                        if path.len() > 1 && path.first().is_none_or(|schema| schema != "pg_catalog") =>
                    {
                        Self::refuse(tree.span().start, "user-defined operators are not supported")
                    }
                    _ => ControlFlow::Continue(()),
                }
            }
            Expr::In { expr, target: InTarget::List(list), .. } => {
                let literal = |value: &Expr| matches!(value, Expr::Value(value) if matches!(value.value, Value::SingleQuotedString(_)));
                if list.iter().all(literal) {
                    self.equality_only.extend(self.bare(expr));
                }
                ControlFlow::Continue(())
            }
            Expr::In { .. } | Expr::Exists { .. } | Expr::Subquery(_) => {
                Self::refuse(tree.span().start, "a subquery in an expression is not supported")
            }
            Expr::Function(function) if is_qualified(&function.name) => {
                Self::refuse(tree.span().start, "user-defined functions are not supported")
            }
            _ => ControlFlow::Continue(()),
        }
    }
}

/// Names a schema other than PostgreSQL's own.
fn is_qualified(name: &ObjectName) -> bool {
    match name.0.as_slice() {
        [] | [ObjectNamePart::Identifier(_)] => false,
        [ObjectNamePart::Identifier(schema), ObjectNamePart::Identifier(_)] => fold(schema) != "pg_catalog",
        _ => true,
    }
}

fn is_foreign(data_type: &DataType) -> bool {
    match data_type {
        DataType::Custom(name, _) => is_qualified(name),
        DataType::Array(ArrayElemTypeDef::SquareBracket(element, _) | ArrayElemTypeDef::Qualified(element, _)) => {
            is_foreign(element)
        }
        _ => false,
    }
}
