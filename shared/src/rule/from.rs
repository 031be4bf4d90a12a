//! `FROM … WHERE …` of rules and assignments: tables, inner joins, and the conditions that a combination of their rows
//! must meet. Anything outside of select-project-join is refused with its place and the reason.

use std::ops::Range;

use sqlparser::ast::{
    Distinct, Expr, GroupByExpr, Join, JoinConstraint, JoinOperator, ObjectName, ObjectNamePart, Query, Select,
    SetExpr, Spanned, TableFactor,
};
use sqlparser::dialect::PostgreSqlDialect;
use sqlparser::keywords::Keyword;
use sqlparser::parser::Parser;
use sqlparser::tokenizer::{Location, Token, TokenWithSpan};

use super::SqlProblem;
use super::expression::{ParsedExpression, Reference, fold, offset, parameters, parser_problem, tokenize};
use crate::registry::RelationName;

/// The tables of FROM.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FromClause {
    tables: Vec<FromTable>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct FromTable {
    /// The name's parts as PostgreSQL folds them.
    relation: Vec<String>,
    /// An alias hides the table's own name.
    alias: Option<String>,
}

/// A query as it was read: its SELECT, the tables, and the conditions in their order.
pub(super) struct Parsed {
    pub select: Select,
    pub from: FromClause,
    pub conditions: Vec<ParsedExpression>,
    /// Where the items of the select list stand.
    pub items: Vec<Range<usize>>,
    pub parameters: Vec<(Range<usize>, Reference)>,
}

impl FromTable {
    fn matches(&self, name: &[String]) -> bool {
        match &self.alias {
            Some(alias) => name == std::slice::from_ref(alias),
            None => self.relation.ends_with(name),
        }
    }
}

impl FromClause {
    /// How many tables there are; one that stands several times counts each time.
    #[expect(clippy::len_without_is_empty, reason = "there is always one")]
    pub fn len(&self) -> usize {
        self.tables.len()
    }

    /// The tables that a qualifier names.
    pub(super) fn matching(&self, name: &[String]) -> Vec<usize> {
        (0..self.tables.len()).filter(|index| self.tables[*index].matches(name)).collect()
    }

    /// The relation of each table, among the configured ones.
    ///
    /// # Errors
    /// One is none of them, or several by its unqualified name; the error is the reason.
    pub fn relations<'a>(
        &self,
        configured: impl IntoIterator<Item = &'a RelationName>,
    ) -> Result<Vec<&'a RelationName>, String> {
        let configured: Vec<&RelationName> = configured.into_iter().collect();
        self.tables.iter().map(|table| table.relation(&configured)).collect()
    }
}

impl FromTable {
    fn relation<'a>(&self, configured: &[&'a RelationName]) -> Result<&'a RelationName, String> {
        let matching = |relation: &&RelationName| match self.relation.as_slice() {
            [name] => relation.name() == name,
            [schema, name] => relation.schema() == schema && relation.name() == name,
            _ => false,
        };
        let mut found = configured.iter().copied().filter(matching);
        let written = self.relation.join(".");
        match (found.next(), found.next()) {
            (Some(relation), None) => Ok(relation),
            (Some(_), Some(_)) => Err(format!("table {written} stands in several schemas: write its schema")),
            (None, _) => Err(format!("table {written} is not among the configured tables")),
        }
    }
}

/// Reads `SELECT … FROM … WHERE …`; `with_parameters`: `:user_id` and `:claims` may stand in it.
pub(super) fn parse(text: &str, with_parameters: bool) -> Result<Parsed, SqlProblem> {
    let tokens = tokenize(text)?;
    let clauses = clauses(text, &tokens);
    let parameters = parameters(text, &tokens);
    let mut parser = Parser::new(&PostgreSqlDialect {}).with_tokens_with_locations(tokens);
    let query = parser.parse_query().map_err(|error| parser_problem(&error))?;
    let next = parser.peek_token();
    if next.token != Token::EOF {
        return Err(SqlProblem::at(next.span.start, format!("unexpected {}", next.token)));
    }
    let select = plain_select(*query)?;
    let (from, trees) = from(&select, with_parameters)?;
    let lost = |tree: &Expr| SqlProblem::at(tree.span().start, "the parser lost a condition's place".to_owned());
    let known = with_parameters.then_some(parameters.as_slice());
    let mut conditions = Vec::new();
    let mut places = clauses.iter().filter(|clause| clause.kind == ClauseKind::On).map(|clause| clause.content.clone());
    for tree in trees {
        let place = places.next().ok_or_else(|| lost(&tree))?;
        conditions.push(ParsedExpression::within(text, place, tree, known)?);
    }
    if let Some(tree) = select.selection.clone() {
        let place = clauses.iter().find(|clause| clause.kind == ClauseKind::Where).ok_or_else(|| lost(&tree))?;
        conditions.push(ParsedExpression::within(text, place.content.clone(), tree, known)?);
    }
    let list = clauses.split(|clause| clause.kind == ClauseKind::From).next().unwrap_or_default();
    let mut items: Vec<Range<usize>> = list.iter().map(|clause| clause.content.clone()).collect();
    if list.get(1).is_some_and(|clause| clause.kind == ClauseKind::Distinct) {
        items.remove(0);
    }
    Ok(Parsed { select, from, conditions, items, parameters })
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ClauseKind {
    Select,
    /// Of `SELECT DISTINCT`.
    Distinct,
    From,
    On,
    Where,
    /// A keyword or a comma that ends a condition.
    Other,
}

/// A part of a query: what follows its keyword.
#[derive(Debug)]
struct Clause {
    kind: ClauseKind,
    content: Range<usize>,
}

/// Keywords and commas outside of parentheses that begin a part of a query. None of the keywords can stand in an
/// expression there but as a column's name after a dot.
fn clauses(text: &str, tokens: &[TokenWithSpan]) -> Vec<Clause> {
    let mut found: Vec<Clause> = Vec::new();
    let mut depth = 0_i32;
    let mut after_dot = false;
    let mut before = Keyword::NoKeyword;
    for token in tokens {
        let kind = match &token.token {
            Token::LParen | Token::LBracket => {
                depth += 1;
                None
            }
            Token::RParen | Token::RBracket => {
                depth -= 1;
                None
            }
            Token::Comma => Some((ClauseKind::Other, 1)),
            Token::Word(word) if word.quote_style.is_none() && !after_dot => {
                let kind = match word.keyword {
                    Keyword::SELECT => Some(ClauseKind::Select),
                    Keyword::DISTINCT if before == Keyword::SELECT => Some(ClauseKind::Distinct),
                    // Not that of IS DISTINCT FROM.
                    Keyword::FROM if before != Keyword::DISTINCT => Some(ClauseKind::From),
                    Keyword::ON => Some(ClauseKind::On),
                    Keyword::WHERE => Some(ClauseKind::Where),
                    Keyword::JOIN | Keyword::INNER | Keyword::CROSS => Some(ClauseKind::Other),
                    _ => None,
                };
                kind.map(|kind| (kind, word.value.len()))
            }
            _ => None,
        };
        match &token.token {
            Token::Whitespace(_) => {}
            Token::Word(word) if word.quote_style.is_none() => before = word.keyword,
            _ => before = Keyword::NoKeyword,
        }
        after_dot = token.token == Token::Period || (after_dot && matches!(token.token, Token::Whitespace(_)));
        let Some((kind, length)) = kind.filter(|_| depth == 0) else { continue };
        let Some(start) = offset(text, token.span.start) else { continue };
        if let Some(last) = found.last_mut() {
            last.content.end = start;
        }
        found.push(Clause { kind, content: start + length..text.len() });
    }
    found
}

pub(super) fn refuse<T>(at: Location, reason: &str) -> Result<T, SqlProblem> {
    Err(SqlProblem::at(at, reason.to_owned()))
}

const SHAPE: &str = "only SELECT … FROM table JOIN table ON … WHERE … is supported";

/// The query's SELECT, when the query is nothing else.
fn plain_select(query: Query) -> Result<Select, SqlProblem> {
    let at = query.span().start;
    let Query { with, body, order_by, limit_clause, fetch, locks, for_clause, settings, format_clause, pipe_operators } =
        query;
    if with.is_some() {
        return refuse(at, "WITH is not supported: write one SELECT … FROM table WHERE …");
    }
    if order_by.is_some() {
        return refuse(at, "ORDER BY has no meaning in a rule");
    }
    if limit_clause.is_some() || fetch.is_some() {
        return refuse(at, "LIMIT, OFFSET and FETCH are not possible in a rule: membership is each row's own");
    }
    if !locks.is_empty() || for_clause.is_some() || settings.is_some() || format_clause.is_some() {
        return refuse(at, SHAPE);
    }
    if !pipe_operators.is_empty() {
        return refuse(at, "pipe operators are not supported");
    }
    match *body {
        SetExpr::Select(select) => Ok(*select),
        SetExpr::SetOperation { .. } => {
            refuse(at, "UNION, INTERSECT and EXCEPT are not supported: write a rule for each part")
        }
        _ => refuse(at, SHAPE),
    }
}

/// The tables, and the ON conditions in their order.
fn from(select: &Select, assignment: bool) -> Result<(FromClause, Vec<Expr>), SqlProblem> {
    let at = select.span().start;
    // What is assigned is a set anyway.
    if select.distinct.is_some() && !(assignment && matches!(select.distinct, Some(Distinct::Distinct))) {
        return refuse(at, "DISTINCT has no meaning in a rule");
    }
    let grouped = !matches!(&select.group_by, GroupByExpr::Expressions(by, with) if by.is_empty() && with.is_empty());
    if grouped || select.having.is_some() {
        return refuse(at, "GROUP BY and HAVING are not supported");
    }
    let plain = select.optimizer_hints.is_empty()
        && select.select_modifiers.is_none()
        && select.top.is_none()
        && select.exclude.is_none()
        && select.into.is_none()
        && select.lateral_views.is_empty()
        && select.prewhere.is_none()
        && select.connect_by.is_empty()
        && select.cluster_by.is_empty()
        && select.distribute_by.is_empty()
        && select.sort_by.is_empty()
        && select.named_window.is_empty()
        && select.qualify.is_none()
        && select.value_table_mode.is_none();
    if !plain {
        return refuse(at, SHAPE);
    }
    if select.from.is_empty() {
        return refuse(at, "the query has no FROM");
    }
    let mut clause = FromClause { tables: Vec::new() };
    let mut conditions = Vec::new();
    for item in &select.from {
        clause.add(&item.relation)?;
        for join in &item.joins {
            clause.add(&join.relation)?;
            conditions.extend(condition(join)?);
        }
    }
    Ok((clause, conditions))
}

impl FromClause {
    fn add(&mut self, factor: &TableFactor) -> Result<(), SqlProblem> {
        let (relation, alias) = table(factor)?;
        let added = FromTable { relation, alias };
        let same = |other: &&FromTable| {
            let name = |table: &FromTable| table.alias.clone().or_else(|| table.relation.last().cloned());
            name(other) == name(&added)
                && (other.alias.is_some() || added.alias.is_some() || other.relation == added.relation)
        };
        if self.tables.iter().any(|other| same(&other)) {
            return refuse(factor.span().start, "two tables of FROM have one name: give each an alias of its own");
        }
        self.tables.push(added);
        Ok(())
    }
}

/// The condition of an inner join.
fn condition(join: &Join) -> Result<Option<Expr>, SqlProblem> {
    let at = join.relation.span().start;
    let (JoinOperator::Join(constraint) | JoinOperator::Inner(constraint) | JoinOperator::CrossJoin(constraint)) =
        &join.join_operator
    else {
        return refuse(at, "only inner joins are supported: a row that has no partner is in no scope by it");
    };
    if join.global {
        return refuse(at, SHAPE);
    }
    match (constraint, &join.join_operator) {
        (JoinConstraint::None, JoinOperator::CrossJoin(_)) => Ok(None),
        (JoinConstraint::On(condition), JoinOperator::Join(_) | JoinOperator::Inner(_)) => Ok(Some(condition.clone())),
        (JoinConstraint::Natural, _) => refuse(at, "NATURAL is not supported: write the join's condition with ON"),
        (JoinConstraint::Using(_) | JoinConstraint::UsingAlias(..), _) => {
            refuse(at, "USING is not supported: write the join's condition with ON")
        }
        _ => refuse(at, "a join has its condition after ON"),
    }
}

/// A table of FROM and its alias.
fn table(factor: &TableFactor) -> Result<(Vec<String>, Option<String>), SqlProblem> {
    let at = factor.span().start;
    let TableFactor::Table {
        name,
        alias,
        args: None,
        with_hints,
        version: None,
        with_ordinality: false,
        partitions,
        json_path: None,
        sample: None,
        index_directives,
        inheritance: None,
    } = factor
    else {
        return refuse(at, "FROM must name a table");
    };
    if !with_hints.is_empty() || !partitions.is_empty() || !index_directives.is_empty() {
        return refuse(at, "FROM must name a table");
    }
    let alias = match alias {
        Some(alias) if !alias.columns.is_empty() || alias.at.is_some() => {
            return refuse(at, "a list of column aliases is not supported");
        }
        Some(alias) => Some(fold(&alias.name)),
        None => None,
    };
    let relation = object_name(name).filter(|parts| parts.len() <= 2);
    match relation {
        Some(relation) => Ok((relation, alias)),
        None => refuse(at, "a table is named by its name, or by schema and name"),
    }
}

pub(super) fn object_name(name: &ObjectName) -> Option<Vec<String>> {
    let part = |part: &ObjectNamePart| match part {
        ObjectNamePart::Identifier(ident) => Some(fold(ident)),
        ObjectNamePart::Function(_) => None,
    };
    name.0.iter().map(part).collect()
}
