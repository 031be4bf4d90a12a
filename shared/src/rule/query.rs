//! The `rows` query of a rule: which rows of which table. Today one table; a join is refused by name, and comes in
//! as further tables of [`RuleQuery`].

use std::collections::BTreeSet;

use sqlparser::ast::{
    GroupByExpr, ObjectName, ObjectNamePart, Query, Select, SelectItem, SelectItemQualifiedWildcardKind, SetExpr,
    Spanned, TableFactor, WildcardAdditionalOptions,
};
use sqlparser::dialect::PostgreSqlDialect;
use sqlparser::keywords::Keyword;
use sqlparser::parser::Parser;
use sqlparser::tokenizer::{Location, Token, TokenWithSpan};

use super::SqlProblem;
use super::expression::{ParsedExpression, Qualifier, fold, offset, parser_problem, tokenize};
use crate::registry::RelationName;

/// A rule's query as it was read, its names not yet looked up.
#[derive(Clone, PartialEq, Debug)]
pub struct RuleQuery {
    relation: Vec<String>,
    alias: Option<String>,
    filter: Option<ParsedExpression>,
}

impl RuleQuery {
    /// Reads `SELECT * FROM table [alias] [WHERE …]`.
    ///
    /// # Errors
    /// The text is anything else; the problem names the position and the reason.
    pub fn parse(text: &str) -> Result<Self, SqlProblem> {
        let text = text.trim_end().strip_suffix(';').unwrap_or(text);
        let tokens = tokenize(text)?;
        let filter_start = filter_start(text, &tokens);
        let mut parser = Parser::new(&PostgreSqlDialect {}).with_tokens_with_locations(tokens);
        let query = parser.parse_query().map_err(|error| parser_problem(&error))?;
        let next = parser.peek_token();
        if next.token != Token::EOF {
            return Err(SqlProblem::at(next.span.start, format!("unexpected {}", next.token)));
        }
        let select = plain_select(*query)?;
        let (relation, alias) = table(&select)?;
        let qualifier = qualifier(&relation, alias.as_deref());
        projection(&select, &qualifier)?;
        let filter = match select.selection {
            None => None,
            Some(tree) => {
                let start = filter_start.ok_or_else(|| {
                    SqlProblem::at(tree.span().start, "the parser lost the WHERE clause's place".to_owned())
                })?;
                Some(ParsedExpression::within(text, start, tree)?)
            }
        };
        Ok(Self { relation, alias, filter })
    }

    /// The relation that the rule reads, among the configured ones.
    ///
    /// # Errors
    /// It is none of them, or several by its unqualified name; the error is the reason.
    pub fn target<'a>(
        &self,
        relations: impl IntoIterator<Item = &'a RelationName>,
    ) -> Result<&'a RelationName, String> {
        let matching = |relation: &&RelationName| match self.relation.as_slice() {
            [name] => relation.name() == name,
            [schema, name] => relation.schema() == schema && relation.name() == name,
            _ => false,
        };
        let mut found = relations.into_iter().filter(matching);
        let written = self.relation.join(".");
        match (found.next(), found.next()) {
            (Some(relation), None) => Ok(relation),
            (Some(_), Some(_)) => Err(format!("table {written} stands in several schemas: write its schema")),
            (None, _) => Err(format!("table {written} is not among the configured tables")),
        }
    }

    pub(crate) fn filter(&self) -> Option<&ParsedExpression> {
        self.filter.as_ref()
    }

    pub(crate) fn qualifier(&self) -> Qualifier {
        qualifier(&self.relation, self.alias.as_deref())
    }

    /// Names of the columns that the filter and the scope's values read.
    ///
    /// # Errors
    /// Names that cannot be of the rule's table.
    pub fn column_names<'a>(&'a self, values: &'a [ParsedExpression]) -> Result<BTreeSet<&'a str>, SqlProblem> {
        let qualifier = self.qualifier();
        let mut names = BTreeSet::new();
        for expression in self.filter.iter().chain(values) {
            names.extend(expression.column_names(&qualifier)?);
        }
        Ok(names)
    }
}

fn qualifier(relation: &[String], alias: Option<&str>) -> Qualifier {
    match alias {
        Some(alias) => Qualifier { parts: vec![alias.to_owned()], aliased: true },
        None => Qualifier { parts: relation.to_vec(), aliased: false },
    }
}

/// The octet after the WHERE keyword; nothing before it in an accepted query can hold another.
fn filter_start(text: &str, tokens: &[TokenWithSpan]) -> Option<usize> {
    const LENGTH: usize = "where".len();
    let is_where = |token: &&TokenWithSpan| matches!(&token.token, Token::Word(word) if word.keyword == Keyword::WHERE && word.quote_style.is_none());
    tokens.iter().find(is_where).and_then(|token| offset(text, token.span.start)).map(|start| start + LENGTH)
}

fn refuse<T>(at: Location, reason: &str) -> Result<T, SqlProblem> {
    Err(SqlProblem::at(at, reason.to_owned()))
}

/// The query's SELECT, when the query is nothing else.
fn plain_select(query: Query) -> Result<Select, SqlProblem> {
    let at = query.span().start;
    let Query { with, body, order_by, limit_clause, fetch, locks, for_clause, settings, format_clause, pipe_operators } =
        query;
    if with.is_some() {
        return refuse(at, "WITH is not supported: a rule is SELECT * FROM table WHERE …");
    }
    if order_by.is_some() {
        return refuse(at, "ORDER BY has no meaning in a rule");
    }
    if limit_clause.is_some() || fetch.is_some() {
        return refuse(at, "LIMIT, OFFSET and FETCH are not possible in a rule: membership is each row's own");
    }
    if !locks.is_empty() || for_clause.is_some() || settings.is_some() || format_clause.is_some() {
        return refuse(at, "only SELECT * FROM table WHERE … is supported");
    }
    if !pipe_operators.is_empty() {
        return refuse(at, "pipe operators are not supported");
    }
    match *body {
        SetExpr::Select(select) => Ok(*select),
        SetExpr::SetOperation { .. } => {
            refuse(at, "UNION, INTERSECT and EXCEPT are not supported: write a rule for each part")
        }
        _ => refuse(at, "only SELECT * FROM table WHERE … is supported"),
    }
}

/// The one table of `FROM` and its alias.
fn table(select: &Select) -> Result<(Vec<String>, Option<String>), SqlProblem> {
    let at = select.span().start;
    if select.distinct.is_some() {
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
        return refuse(at, "only SELECT * FROM table WHERE … is supported");
    }
    let from = match select.from.as_slice() {
        [] => return refuse(at, "the rule has no FROM"),
        [from] if from.joins.is_empty() => from,
        [from] => return refuse(from.joins[0].relation.span().start, "joins are not supported yet"),
        [_, second, ..] => return refuse(second.relation.span().start, "joins are not supported yet"),
    };
    let at = from.relation.span().start;
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
    } = &from.relation
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

/// Checks that the query selects the table's whole rows.
fn projection(select: &Select, qualifier: &Qualifier) -> Result<(), SqlProblem> {
    let at = select.span().start;
    let options = match select.projection.as_slice() {
        [SelectItem::Wildcard(options)] => options,
        [SelectItem::QualifiedWildcard(SelectItemQualifiedWildcardKind::ObjectName(name), options)] => {
            let of_table = object_name(name).is_some_and(|parts| {
                parts == qualifier.parts || (!qualifier.aliased && qualifier.parts.ends_with(&parts))
            });
            if !of_table {
                return refuse(name.span().start, "the rule selects from what FROM does not name");
            }
            options
        }
        _ => return refuse(at, "a rule selects * of its table: which columns are delivered stands under tables"),
    };
    let WildcardAdditionalOptions {
        wildcard_token: _,
        opt_ilike: None,
        opt_exclude: None,
        opt_except: None,
        opt_replace: None,
        opt_rename: None,
        opt_alias: None,
    } = options
    else {
        return refuse(at, "a rule selects * of its table: which columns are delivered stands under tables");
    };
    Ok(())
}

fn object_name(name: &ObjectName) -> Option<Vec<String>> {
    let part = |part: &ObjectNamePart| match part {
        ObjectNamePart::Identifier(ident) => Some(fold(ident)),
        ObjectNamePart::Function(_) => None,
    };
    name.0.iter().map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        RuleQuery::parse(text).expect_err(text).to_string()
    }

    #[test]
    fn reads_one_table_with_or_without_a_filter() {
        for text in [
            "SELECT * FROM documents",
            "select d.* from public.documents as d where d.a = 1",
            "select documents.* from public.documents where documents.a and public.documents.b is null",
            "SELECT * FROM documents WHERE a = ';' -- the last ;\n",
            "SELECT * FROM documents WHERE a;",
            "SELECT * FROM documents WHERE \"where\" = 'where'",
        ] {
            RuleQuery::parse(text).expect(text);
        }
    }

    #[test]
    fn refuses_everything_else_with_position_and_reason() {
        for (text, expected) in [
            ("", "Expected: SELECT, VALUES, or a subquery in the query body, found: EOF"),
            ("SELECT * FROM a JOIN b ON true", "line 1, column 22 of the SQL: joins are not supported yet"),
            ("SELECT * FROM a, b", "line 1, column 18 of the SQL: joins are not supported yet"),
            ("SELECT * FROM a\n WHERE x IN (SELECT 1)", "line 2, column 8 of the SQL: a subquery in an expression"),
            ("SELECT * FROM a WHERE EXISTS (SELECT 1)", "a subquery in an expression"),
            ("SELECT id FROM a", "line 1, column 1 of the SQL: a rule selects * of its table"),
            ("SELECT b.* FROM a", "line 1, column 8 of the SQL: the rule selects from what FROM does not name"),
            ("SELECT a.* FROM a x", "the rule selects from what FROM does not name"),
            ("SELECT DISTINCT * FROM a", "DISTINCT has no meaning"),
            ("SELECT * FROM a GROUP BY x", "GROUP BY and HAVING"),
            ("SELECT * FROM a ORDER BY x", "ORDER BY has no meaning"),
            ("SELECT * FROM a LIMIT 1", "LIMIT, OFFSET and FETCH"),
            ("SELECT * FROM a UNION SELECT * FROM b", "write a rule for each part"),
            ("WITH x AS (SELECT 1) SELECT * FROM a", "WITH is not supported"),
            ("SELECT * FROM a FOR UPDATE", "only SELECT * FROM table"),
            ("SELECT * FROM (SELECT 1) a", "FROM must name a table"),
            ("SELECT * FROM f(1)", "FROM must name a table"),
            ("SELECT * FROM ONLY a", "FROM must name a table"),
            ("SELECT * FROM a TABLESAMPLE SYSTEM (1)", "FROM must name a table"),
            ("SELECT * FROM a (x)", ""),
            ("SELECT * FROM a.b.c", "a table is named by its name"),
            ("SELECT *", "the rule has no FROM"),
            ("DELETE FROM a", ""),
            ("SELECT * FROM a; SELECT * FROM b", "line 1, column 16 of the SQL: unexpected ;"),
            ("SELECT * FROM a WHERE x = $1", "line 1, column 27 of the SQL: parameters are not possible here"),
            ("SELECT * FROM a WHERE x = 'open", "line 1, column 27 of the SQL: Unterminated string literal"),
            ("SELECT * FROM a WHERE x =", "Expected: an expression, found: EOF"),
            ("SELECT * FROM a WHERE (x", "found: EOF"),
            ("SELECT * FROM a WHERE x)", "line 1, column 24 of the SQL: unexpected )"),
            ("SELECT * FROM a WHERE public.f(x)", "user-defined functions are not supported"),
            ("SELECT * FROM a WHERE x::public.mood = 'a'", "user-defined type"),
            ("SELECT * FROM a WHERE x OPERATOR(public.=) 1", "user-defined operators"),
            ("SELECT * FROM a WHERE (x).y = 1", "composite"),
        ] {
            assert!(refused(text).contains(expected), "{text}: {}", refused(text));
        }
    }

    #[test]
    fn the_table_is_found_among_the_configured_ones() {
        let name = |text: &str| text.parse::<RelationName>().expect(text);
        let configured = [name("public.a"), name("other.a"), name("public.b")];
        let target =
            |from: &str| RuleQuery::parse(&format!("SELECT * FROM {from}")).expect(from).target(&configured).cloned();
        assert_eq!(target("b"), Ok(name("public.b")));
        assert_eq!(target("B"), Ok(name("public.b")));
        assert_eq!(target("other.a"), Ok(name("other.a")));
        assert_eq!(target("a"), Err("table a stands in several schemas: write its schema".to_owned()));
        assert_eq!(target("\"B\""), Err("table B is not among the configured tables".to_owned()));
        assert_eq!(target("x.b"), Err("table x.b is not among the configured tables".to_owned()));
    }
}
