//! The `rows` query of a rule: which rows of which table, by joins with which others.

use sqlparser::ast::{Select, SelectItem, SelectItemQualifiedWildcardKind, Spanned, WildcardAdditionalOptions};

use super::SqlProblem;
use super::expression::{Named, ParsedExpression};
use super::from::{self, FromClause, object_name, refuse};
use crate::registry::Table;

/// A rule's query as it was read, its names not yet looked up.
#[derive(Clone, PartialEq, Debug)]
pub struct RuleQuery {
    from: FromClause,
    target: usize,
    conditions: Vec<ParsedExpression>,
}

impl RuleQuery {
    /// Reads `SELECT t.* FROM table [t] [JOIN … ON …] [WHERE …]`.
    ///
    /// # Errors
    /// The text is anything else; the problem names the position and the reason.
    pub fn parse(text: &str) -> Result<Self, SqlProblem> {
        let text = text.trim_end().strip_suffix(';').unwrap_or(text);
        let parsed = from::parse(text, false)?;
        let target = target(&parsed.select, &parsed.from)?;
        Ok(Self { from: parsed.from, target, conditions: parsed.conditions })
    }

    /// The tables that the rule reads.
    pub fn from(&self) -> &FromClause {
        &self.from
    }

    /// The table, among those of FROM, whose rows the rule delivers.
    pub fn target(&self) -> usize {
        self.target
    }

    /// What a combination of rows must meet: the joins' conditions and the filter.
    pub fn conditions(&self) -> &[ParsedExpression] {
        &self.conditions
    }

    /// Columns that are looked up by equality.
    pub fn lookups(&self, tables: &[&Table]) -> Vec<(usize, usize)> {
        self.conditions.iter().flat_map(|condition| condition.lookups(&self.from, tables)).collect()
    }

    /// The columns that the conditions and the scope's values read, as they are written.
    ///
    /// # Errors
    /// Names that cannot be of the rule's tables.
    pub fn names<'a>(&'a self, values: &'a [ParsedExpression]) -> Result<Vec<Named<'a>>, SqlProblem> {
        let mut names = Vec::new();
        for expression in self.conditions.iter().chain(values) {
            names.extend(expression.names(&self.from)?);
        }
        Ok(names)
    }
}

/// The one table whose whole rows are selected.
fn target(select: &Select, from: &FromClause) -> Result<usize, SqlProblem> {
    let at = select.span().start;
    let (target, options) = match select.projection.as_slice() {
        [SelectItem::Wildcard(options)] if from.len() == 1 => (0, options),
        [SelectItem::Wildcard(_)] => {
            return refuse(at, "a rule with joins selects the rows of one table: SELECT table.* FROM …");
        }
        [SelectItem::QualifiedWildcard(SelectItemQualifiedWildcardKind::ObjectName(name), options)] => {
            let found = object_name(name).map(|parts| from.matching(&parts)).unwrap_or_default();
            let &[target] = found.as_slice() else {
                return refuse(name.span().start, "the rule selects from what FROM does not name");
            };
            (target, options)
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
    Ok(target)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::RelationName;

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
            "SELECT t.* FROM tasks t JOIN members m ON m.project_id = t.project_id WHERE NOT t.archived",
            "SELECT a.* FROM s.a INNER JOIN b ON (b.x = a.x) AND f(b.x, 1) IN (1, 2) CROSS JOIN c, d WHERE d.where = 1",
            "SELECT a.* FROM t a JOIN t b ON a.id = b.parent",
        ] {
            RuleQuery::parse(text).expect(text);
        }
    }

    #[test]
    fn refuses_everything_else_with_position_and_reason() {
        for (text, expected) in [
            ("", "Expected: SELECT, VALUES, or a subquery in the query body, found: EOF"),
            (
                "SELECT * FROM a JOIN b ON true",
                "line 1, column 1 of the SQL: a rule with joins selects the rows of one",
            ),
            ("SELECT a.*, b.* FROM a, b", "line 1, column 1 of the SQL: a rule selects * of its table"),
            ("SELECT a.* FROM a LEFT JOIN b ON true", "line 1, column 29 of the SQL: only inner joins are supported"),
            ("SELECT a.* FROM a FULL JOIN b ON true", "only inner joins are supported"),
            ("SELECT a.* FROM a JOIN b", "a join has its condition after ON"),
            ("SELECT a.* FROM a NATURAL JOIN b", "NATURAL is not supported"),
            ("SELECT a.* FROM a\nJOIN b USING (x)", "line 2, column 6 of the SQL: USING is not supported"),
            ("SELECT a.* FROM a JOIN a ON true", "two tables of FROM have one name"),
            ("SELECT a.* FROM a JOIN (b JOIN c ON true) ON true", "FROM must name a table"),
            ("SELECT a.* FROM a JOIN LATERAL (SELECT 1) b ON true", "FROM must name a table"),
            ("SELECT a.* FROM a JOIN b ON b.x = (SELECT 1)", "a subquery in an expression"),
            ("SELECT a.* FROM a JOIN b ON b.x = :user_id", "line 1, column 35 of the SQL: parameters are not possible"),
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
            ("SELECT * FROM a FOR UPDATE", "only SELECT … FROM table"),
            ("SELECT * FROM (SELECT 1) a", "FROM must name a table"),
            ("SELECT * FROM f(1)", "FROM must name a table"),
            ("SELECT * FROM ONLY a", "FROM must name a table"),
            ("SELECT * FROM a TABLESAMPLE SYSTEM (1)", "FROM must name a table"),
            ("SELECT * FROM a (x)", ""),
            ("SELECT * FROM a.b.c", "a table is named by its name"),
            ("SELECT *", "the query has no FROM"),
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
    fn conditions_are_found_where_they_stand() {
        let query = RuleQuery::parse(
            "SELECT a.* FROM a JOIN b ON a.x = b.on AND (a.y, 1) = (b.y, 1) INNER JOIN c ON c.\"where\" = 'where', d WHERE d.from > 1",
        )
        .expect("a query");
        assert_eq!((query.from().len(), query.target(), query.conditions().len()), (4, 0, 3));
        let names: Vec<(Option<usize>, &str)> =
            query.names(&[]).expect("names").iter().map(|named| (named.table, named.name)).collect();
        let at = |table, name| (Some(table), name);
        assert_eq!(names, [at(0, "x"), at(1, "on"), at(0, "y"), at(1, "y"), at(2, "where"), at(3, "from")]);
    }

    #[test]
    fn tables_are_found_among_the_configured_ones() {
        let name = |text: &str| text.parse::<RelationName>().expect(text);
        let configured = [name("public.a"), name("other.a"), name("public.b")];
        let found = |from: &str| {
            let query = RuleQuery::parse(&format!("SELECT b.* FROM {from}")).expect(from);
            query.from().relations(&configured).map(|found| found.into_iter().cloned().collect::<Vec<_>>())
        };
        assert_eq!(found("b"), Ok(vec![name("public.b")]));
        assert_eq!(found("B"), Ok(vec![name("public.b")]));
        assert_eq!(found("other.a b, b x"), Ok(vec![name("other.a"), name("public.b")]));
        assert_eq!(found("a b"), Err("table a stands in several schemas: write its schema".to_owned()));
        assert_eq!(found("\"B\" b"), Err("table B is not among the configured tables".to_owned()));
        assert_eq!(found("x.b"), Err("table x.b is not among the configured tables".to_owned()));
    }
}
