//! `sync.yaml` as it is written: every problem that can be seen without a database, with its line.

use marked_yaml::Node;
use marked_yaml::types::MarkedMappingNode;

use super::name::RelationName;
use super::yaml::{Located, Reader, line};
use super::{Problem, is_reserved};
use crate::portable::PortableType;
use crate::rule::{AssignmentQuery, FromClause, ParsedExpression, RuleQuery};
use crate::template::{MAX_SCOPE_ID_CHARACTERS, Template};

/// Bound of scopes for a row of a rule that names none.
const DEFAULT_MAX_SCOPES_PER_ROW: u32 = 1000;
/// Schemas whose relations are never synchronized.
const RESERVED_SCHEMAS: [&str; 5] = ["tributary", "tributary_data", "pg_catalog", "information_schema", "pg_toast"];

/// A configuration whose text is right; [`super::Registry::resolve`] checks it against a database.
#[derive(Clone, PartialEq, Debug)]
pub struct SyncConfig {
    /// The tables, in the file's order.
    pub tables: Vec<TableConfig>,
    /// The rules, in the file's order.
    pub scopes: Vec<ScopeConfig>,
    /// The assignments, in the file's order.
    pub assignments: Vec<AssignmentConfig>,
}

/// One table.
#[derive(Clone, PartialEq, Debug)]
pub struct TableConfig {
    /// Line of its entry.
    pub line: usize,
    /// The relation.
    pub relation: Located<RelationName>,
    /// Its logical table id.
    pub id: Located<String>,
    /// The columns to deliver, exactly as the catalog names them; `None`: all.
    pub columns: Option<Vec<Located<String>>>,
    /// Overrides of portable types, by column.
    pub types: Vec<(Located<String>, PortableType)>,
    /// Columns that clients may not write, beside the key and generated ones.
    pub read_only: Vec<Located<String>>,
    /// Columns that say when a row was made, changed and deleted.
    pub lifecycle: LifecycleConfig,
    /// Read by rules, never delivered.
    pub capture_only: bool,
}

/// Columns of a row's life.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct LifecycleConfig {
    /// When it was made.
    pub created_at: Option<Located<String>>,
    /// When it was last changed.
    pub updated_at: Option<Located<String>>,
    /// When it was deleted.
    pub deleted_at: Option<Located<String>>,
}

/// One rule.
#[derive(Clone, PartialEq, Debug)]
pub struct ScopeConfig {
    /// Line of its entry.
    pub line: usize,
    /// The scope template.
    pub scope: Located<String>,
    /// The template, read.
    pub template: Template,
    /// The template's values.
    pub values: Vec<ParsedExpression>,
    /// The query.
    pub rows: Located<String>,
    /// The query, read.
    pub query: RuleQuery,
    /// Bound of scopes for a row.
    pub max_scopes_per_row: u32,
}

/// One assignment.
#[derive(Clone, PartialEq, Debug)]
pub struct AssignmentConfig {
    /// The scope template.
    pub scope: Located<String>,
    /// The template, read; without a query its values are all the user id.
    pub template: Template,
    /// The names of the template's values.
    pub names: Vec<String>,
    /// The query, read, and the line that it stands on.
    pub query: Option<Located<AssignmentQuery>>,
}

impl SyncConfig {
    /// Reads `sync.yaml`.
    ///
    /// # Errors
    /// Every problem of the text, in line order.
    pub fn parse(yaml: &str) -> Result<Self, Vec<Problem>> {
        let (config, problems) = Self::read(yaml);
        if problems.is_empty() { Ok(config) } else { Err(problems) }
    }

    /// Reads `sync.yaml` as far as it can be read: what is right of it, and every problem of the rest, in line order.
    /// For a check, which goes on to the catalog to find the problems that only a database shows.
    pub fn read(yaml: &str) -> (Self, Vec<Problem>) {
        let mut reader = Reader::default();
        let mut config = Self { tables: Vec::new(), scopes: Vec::new(), assignments: Vec::new() };
        let document = reader.document(yaml);
        let known = ["tables", "scopes", "assignments"];
        if let Some(document) = &document
            && let Some(top) = reader.mapping(document, "the file", &known)
        {
            config.tables = list(&mut reader, top, "tables", table);
            config.scopes = list(&mut reader, top, "scopes", scope);
            config.assignments = list(&mut reader, top, "assignments", assignment);
            match top.get_node("tables") {
                None => reader.problem(line(document), "the file has no tables"),
                Some(tables) if tables.as_sequence().is_some_and(|list| list.is_empty()) => {
                    reader.problem(line(tables), "tables is empty");
                }
                Some(_) => {}
            }
        }
        // A table with a problem of its own is missing above: what refers to it is not to blame.
        if reader.problems.is_empty() {
            config.cross_check(&mut reader);
        }
        let mut problems = reader.problems;
        problems.sort();
        problems.dedup();
        if !problems.is_empty() {
            let orphans: Vec<bool> = config.scopes.iter().map(|scope| config.target(scope).is_err()).collect();
            let mut orphans = orphans.into_iter();
            config.scopes.retain(|_| !orphans.next().unwrap_or(false));
        }
        (config, problems)
    }

    /// The relations of all tables.
    pub fn relations(&self) -> Vec<RelationName> {
        self.tables.iter().map(|table| table.relation.value.clone()).collect()
    }

    /// The table whose rows a rule delivers.
    pub(super) fn target(&self, scope: &ScopeConfig) -> Result<&TableConfig, String> {
        Ok(self.tables_of(scope.query.from())?[scope.query.target()])
    }

    /// The tables of a query, in the order of its FROM.
    pub(super) fn tables_of(&self, from: &FromClause) -> Result<Vec<&TableConfig>, String> {
        let relations = from.relations(self.tables.iter().map(|table| &table.relation.value))?;
        let table = |relation: &RelationName| {
            let table = self.tables.iter().find(|table| table.relation.value == *relation);
            table.ok_or_else(|| format!("table {relation} is not among the configured tables"))
        };
        relations.into_iter().map(table).collect()
    }

    fn cross_check(&self, reader: &mut Reader) {
        for (number, table) in self.tables.iter().enumerate() {
            for earlier in &self.tables[..number] {
                if earlier.relation.value == table.relation.value {
                    let message = format!(
                        "relation {} is configured on line {} too",
                        table.relation.value, earlier.relation.line
                    );
                    reader.problem(table.relation.line, message);
                } else if !table.capture_only && !earlier.capture_only && earlier.id.value == table.id.value {
                    let message = format!(
                        "table id {} belongs to {} on line {} too",
                        table.id.value, earlier.relation.value, earlier.id.line
                    );
                    reader.problem(table.id.line, message);
                }
            }
        }
        for (number, scope) in self.scopes.iter().enumerate() {
            match self.target(scope) {
                Err(reason) => reader.problem(scope.rows.line, format!("rows: {reason}")),
                Ok(table) if table.capture_only => {
                    let message =
                        format!("rows: table {} is capture_only, so that no rule can deliver it", table.relation.value);
                    reader.problem(scope.rows.line, message);
                }
                Ok(_) => {}
            }
            if let Err(problem) = scope.query.names(&scope.values) {
                reader.problem(scope.rows.line, format!("rows or scope: {problem}"));
            }
            let same = |other: &&ScopeConfig| other.scope.value == scope.scope.value && other.query == scope.query;
            if let Some(earlier) = self.scopes[..number].iter().find(same) {
                reader.problem(scope.line, format!("the same rule stands on line {}", earlier.line));
            }
        }
        for (number, assignment) in self.assignments.iter().enumerate() {
            if let Some(query) = &assignment.query {
                if let Err(reason) = self.tables_of(query.value.from()) {
                    reader.problem(query.line, format!("for: {reason}"));
                }
                if let Err(problem) = query.value.names() {
                    reader.problem(query.line, format!("for: {problem}"));
                }
            }
            let query = |other: &AssignmentConfig| other.query.as_ref().map(|query| query.value.clone());
            let same =
                |other: &&AssignmentConfig| other.template == assignment.template && query(other) == query(assignment);
            if let Some(earlier) = self.assignments[..number].iter().find(same) {
                reader.problem(
                    assignment.scope.line,
                    format!("the same assignment stands on line {}", earlier.scope.line),
                );
            }
        }
    }
}

fn list<T>(
    reader: &mut Reader,
    top: &MarkedMappingNode,
    key: &str,
    read: impl Fn(&mut Reader, &Node) -> Option<T>,
) -> Vec<T> {
    let items = top.get_node(key).map(|node| reader.items(node, key)).unwrap_or_default();
    items.into_iter().filter_map(|node| read(reader, node)).collect()
}

fn table(reader: &mut Reader, node: &Node) -> Option<TableConfig> {
    const KEYS: [&str; 7] = ["relation", "id", "columns", "types", "read_only", "lifecycle", "capture_only"];
    const DELIVERED_ONLY: [&str; 4] = ["id", "types", "read_only", "lifecycle"];
    let mapping = reader.mapping(node, "a table", &KEYS)?;
    let line = line(node);
    let capture_only =
        mapping.get_node("capture_only").and_then(|value| reader.boolean(value, "capture_only")).unwrap_or(false);
    for key in DELIVERED_ONLY {
        if let Some(value) = mapping.get_node(key).filter(|_| capture_only) {
            reader.problem(self::line(value), format!("{key} has no meaning for a capture_only table"));
        }
    }
    let columns = mapping.get_node("columns").map(|value| {
        let columns = reader.texts(value, "columns", "a column");
        if value.as_sequence().is_some_and(|list| list.is_empty()) {
            reader.problem(self::line(value), "columns is empty");
        }
        columns
    });
    let types = mapping.get_node("types").map(|value| types(reader, value)).unwrap_or_default();
    let read_only =
        mapping.get_node("read_only").map(|value| reader.texts(value, "read_only", "a column")).unwrap_or_default();
    let lifecycle = mapping.get_node("lifecycle").and_then(|value| lifecycle(reader, value)).unwrap_or_default();
    let id = mapping.get_node("id").and_then(|value| table_id(reader, value));
    let Some(relation) = mapping.get_node("relation") else {
        reader.problem(line, "a table has no relation");
        return None;
    };
    let relation = relation_name(reader, relation)?;
    let id = id.unwrap_or_else(|| Located { line: relation.line, value: relation.value.name().to_owned() });
    Some(TableConfig { line, relation, id, columns, types, read_only, lifecycle, capture_only })
}

fn relation_name(reader: &mut Reader, node: &Node) -> Option<Located<RelationName>> {
    let text = reader.text(node, "relation")?;
    match text.value.parse::<RelationName>() {
        Err(error) => reader.problem(text.line, format!("relation {}: {error}", text.value)),
        Ok(name) if is_reserved(name.name()) || RESERVED_SCHEMAS.contains(&name.schema()) => {
            reader.problem(
                text.line,
                format!("relation {name}: names of Tributary's own and of PostgreSQL's cannot be synchronized"),
            );
        }
        Ok(value) => return Some(Located { line: text.line, value }),
    }
    None
}

fn table_id(reader: &mut Reader, node: &Node) -> Option<Located<String>> {
    let id = reader.text(node, "id")?;
    if id.value.chars().count() > MAX_SCOPE_ID_CHARACTERS || id.value.chars().any(char::is_control) {
        reader.problem(id.line, "id must have at most 255 characters, none of them a control character");
        return None;
    }
    Some(id)
}

fn types(reader: &mut Reader, node: &Node) -> Vec<(Located<String>, PortableType)> {
    let mut types = Vec::new();
    for (column, value) in reader.entries(node, "types") {
        let Some(text) = reader.text(value, "a portable type") else { continue };
        match portable_type(&text.value) {
            Some(portable) => types.push((column, portable)),
            None => reader.problem(text.line, format!("{} is not a portable type", text.value)),
        }
    }
    types
}

fn portable_type(name: &str) -> Option<PortableType> {
    serde_json::from_value(serde_json::Value::String(name.to_owned())).ok()
}

fn lifecycle(reader: &mut Reader, node: &Node) -> Option<LifecycleConfig> {
    let mapping = reader.mapping(node, "lifecycle", &["created_at", "updated_at", "deleted_at"])?;
    let mut column = |key: &str| mapping.get_node(key).and_then(|value| reader.text(value, key));
    let (created_at, updated_at, deleted_at) = (column("created_at"), column("updated_at"), column("deleted_at"));
    Some(LifecycleConfig { created_at, updated_at, deleted_at })
}

fn scope(reader: &mut Reader, node: &Node) -> Option<ScopeConfig> {
    let mapping = reader.mapping(node, "a scope", &["scope", "rows", "max_scopes_per_row"])?;
    let line = line(node);
    let scope = required(reader, mapping, "a scope", "scope", line);
    let template = scope.as_ref().and_then(|scope| {
        let read = Template::parse(&scope.value, ParsedExpression::parse);
        read.map_err(|error| reader.problem(scope.line, error.to_string())).ok()
    });
    let rows = required(reader, mapping, "a scope", "rows", line);
    let query = rows.as_ref().and_then(|rows| {
        RuleQuery::parse(&rows.value).map_err(|error| reader.problem(rows.line, format!("rows: {error}"))).ok()
    });
    let max_scopes_per_row = match mapping.get_node("max_scopes_per_row") {
        None => DEFAULT_MAX_SCOPES_PER_ROW,
        Some(value) => {
            let number =
                value.as_scalar().filter(|scalar| scalar.may_coerce()).and_then(|scalar| scalar.as_str().parse().ok());
            number.filter(|number| *number > 0).unwrap_or_else(|| {
                reader.problem(self::line(value), "max_scopes_per_row must be a positive whole number");
                DEFAULT_MAX_SCOPES_PER_ROW
            })
        }
    };
    let ((template, values), query) = template.zip(query)?;
    Some(ScopeConfig { line, scope: scope?, template, values, rows: rows?, query, max_scopes_per_row })
}

fn assignment(reader: &mut Reader, node: &Node) -> Option<AssignmentConfig> {
    let mapping = reader.mapping(node, "an assignment", &["scope", "for"])?;
    let scope = required(reader, mapping, "an assignment", "scope", line(node))?;
    let query = match mapping.get_node("for") {
        None => None,
        Some(node) => {
            let text = reader.text(node, "for")?;
            match AssignmentQuery::parse(&text.value) {
                Ok(value) => Some(Located { line: text.line, value }),
                Err(problem) => {
                    reader.problem(text.line, format!("for: {problem}"));
                    return None;
                }
            }
        }
    };
    let name = |name: &str| match &query {
        Some(query) if query.value.has_output(name) => Ok(name.to_owned()),
        Some(_) => Err(format!("{name} is not a column that the query selects")),
        None if name == "user_id" => Ok(name.to_owned()),
        None => Err(format!("{name} is unknown; known is user_id")),
    };
    match Template::parse(&scope.value, name) {
        Ok((template, names)) => Some(AssignmentConfig { scope, template, names, query }),
        Err(error) => {
            reader.problem(scope.line, error.to_string());
            None
        }
    }
}

fn required(
    reader: &mut Reader,
    mapping: &MarkedMappingNode,
    what: &str,
    key: &str,
    line: usize,
) -> Option<Located<String>> {
    if let Some(value) = mapping.get_node(key) {
        return reader.text(value, key);
    }
    reader.problem(line, format!("{what} has no {key}"));
    None
}

#[cfg(test)]
mod tests;
