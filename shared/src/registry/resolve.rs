//! A configuration against the source's catalog: names become columns, types and numbers, or problems.

use std::collections::{BTreeMap, BTreeSet};

use super::catalog::{
    Catalog, CatalogColumn, CatalogRelation, ColumnType, Persistence, PrimaryKey, RelationKind, ReplicaIdentity,
    TypeClass,
};
use super::config::{AssignmentConfig, ScopeConfig, SyncConfig, TableConfig};
use super::yaml::Located;
use super::{Assignments, Column, Lifecycle, Problem, Registry, RelationName, Table, Warning, is_reserved};
use crate::portable::PortableType;
use crate::rule::{Assignment, FromClause, Named, Rule, RuleSource, SqlProblem};

/// PostgreSQL 14.
const OLDEST_SERVER: u32 = 140_000;

impl Registry {
    /// Checks a configuration against a catalog. Tables keep the numbers that `previous` gave their relations.
    ///
    /// # Errors
    /// Every problem, in line order.
    pub fn resolve(
        config: &SyncConfig,
        catalog: &Catalog,
        previous: Option<&Self>,
    ) -> Result<(Self, Vec<Warning>), Vec<Problem>> {
        let mut resolver = Resolver {
            config,
            catalog,
            problems: Vec::new(),
            warnings: Vec::new(),
            lookups: Vec::new(),
            refused: BTreeSet::new(),
        };
        let registry = resolver.registry(previous);
        let Resolver { mut problems, mut warnings, .. } = resolver;
        problems.sort();
        problems.dedup();
        warnings.sort();
        if problems.is_empty() { Ok((registry, warnings)) } else { Err(problems) }
    }
}

struct Resolver<'a> {
    config: &'a SyncConfig,
    catalog: &'a Catalog,
    problems: Vec<Problem>,
    warnings: Vec<Warning>,
    /// Columns by which rows are looked up.
    lookups: Vec<(RelationName, usize)>,
    /// Queries that are refused by their columns, by their lines: they are not bound.
    refused: BTreeSet<usize>,
}

impl Resolver<'_> {
    fn problem(&mut self, line: usize, message: impl Into<String>) {
        self.problems.push(Problem { line, message: message.into() });
    }

    fn warning(&mut self, line: usize, message: impl Into<String>) {
        self.warnings.push(Warning { line, message: message.into() });
    }

    fn registry(&mut self, previous: Option<&Registry>) -> Registry {
        if self.catalog.server_version < OLDEST_SERVER {
            self.problem(1, "the source is older than PostgreSQL 14");
        }
        let config = self.config;
        let mut read: BTreeMap<&RelationName, BTreeSet<&str>> = BTreeMap::new();
        let rules = config.scopes.iter().map(|scope| {
            (format!("rule {}", scope.scope.value), scope.line, scope.query.from(), scope.query.names(&scope.values))
        });
        let queries = config.assignments.iter().filter_map(|assignment| {
            let query = assignment.query.as_ref()?;
            let what = format!("assignment {}", assignment.scope.value);
            Some((what, query.line, query.value.from(), query.value.names()))
        });
        for (what, line, from, names) in rules.chain(queries) {
            let (Ok(tables), Ok(names)) = (config.tables_of(from), names) else { continue };
            for named in names {
                if let Some((relation, column)) = self.column(&what, line, &tables, named) {
                    read.entry(relation).or_default().insert(column);
                }
            }
        }
        let mut next_table_no = previous.map_or(1, |previous| previous.next_table_no);
        let mut tables = Vec::new();
        for table in &config.tables {
            let names = read.remove(&table.relation.value).unwrap_or_default();
            let known = previous.and_then(|previous| previous.table_of(&table.relation.value));
            let table_no = if let Some(known) = known {
                known.table_no
            } else {
                let number = next_table_no;
                match next_table_no.checked_add(1) {
                    Some(next) => next_table_no = next,
                    None => self.problem(table.line, "there are no table numbers left"),
                }
                number
            };
            tables.extend(self.table(table, table_no, &names));
        }
        let mut rules = Vec::new();
        for scope in &config.scopes {
            rules.extend(self.rule(scope, &tables));
        }
        self.check_use();
        let (queries, plain): (Vec<&AssignmentConfig>, Vec<&AssignmentConfig>) =
            config.assignments.iter().partition(|assignment| assignment.query.is_some());
        let templates = plain.into_iter().map(|assignment| assignment.template.clone()).collect();
        let queries = queries.into_iter().filter_map(|assignment| self.assignment(assignment, &tables)).collect();
        let assignments = Assignments::new(templates, queries);
        for (relation, column) in std::mem::take(&mut self.lookups) {
            for table in tables.iter_mut().filter(|table| table.relation == relation) {
                let column = &mut table.columns[column];
                column.indexed = is_indexable(&column.type_info);
                if !column.indexed {
                    let configured = config.tables.iter().find(|table| table.relation.value == relation);
                    let message = format!(
                        "column {} of {relation}: rows are looked up by it, and its type {} has no index for that, so that each change reads the whole table; look up by a column of another type",
                        column.name, column.type_info.sql
                    );
                    self.warnings.push(Warning { line: configured.map_or(1, |table| table.relation.line), message });
                }
            }
        }
        Registry { tables, rules, assignments, next_table_no }
    }

    /// The column that a query names, by the catalog: a name without a table must be of one of them alone.
    fn column<'n>(
        &mut self,
        what: &str,
        line: usize,
        tables: &[&'n TableConfig],
        named: Named<'n>,
    ) -> Option<(&'n RelationName, &'n str)> {
        let catalog = self.catalog;
        let of = |index: usize| catalog.relations.iter().find(|other| other.name == tables[index].relation.value);
        let has = |index: &usize| of(*index).is_some_and(|relation| relation.column(named.name).is_some());
        let found: Vec<usize> = match named.table {
            Some(table) => vec![table],
            None => (0..tables.len()).filter(has).collect(),
        };
        let reason = match found.as_slice() {
            [index] => match of(*index).and_then(|relation| relation.column(named.name)) {
                Some(column) if column.generated => {
                    format!("column {} is generated, and PostgreSQL leaves such columns out of the stream", named.name)
                }
                // One that does not exist is reported where the query is bound.
                _ => return Some((&tables[*index].relation.value, named.name)),
            },
            [] => return None,
            _ => format!("column {} is of several tables of FROM: write its table too", named.name),
        };
        self.problem(line, format!("{what}: {}", SqlProblem::at(named.at, reason)));
        self.refused.insert(line);
        None
    }

    /// Tables, rules and assignments that have no effect.
    fn check_use(&mut self) {
        let config = self.config;
        for table in &config.tables {
            let delivers = |scope: &ScopeConfig| config.target(scope).is_ok_and(|target| std::ptr::eq(target, table));
            let delivered = config.scopes.iter().any(delivers);
            if !delivered && !table.capture_only {
                self.warning(table.line, format!("no rule delivers rows of {}", table.relation.value));
            }
        }
        for assignment in &config.assignments {
            let prefix = assignment.template.prefix();
            let fits = |scope: &ScopeConfig| {
                let other = scope.template.prefix();
                prefix.starts_with(other) || other.starts_with(prefix)
            };
            if !config.scopes.iter().any(fits) {
                self.warning(assignment.scope.line, format!("no rule gives the scope {}", assignment.scope.value));
            }
        }
        for scope in &config.scopes {
            let prefix = scope.template.prefix();
            let fits = |other: &str| prefix.starts_with(other) || other.starts_with(prefix);
            if !config.assignments.iter().any(|assignment| fits(assignment.template.prefix())) {
                self.warning(scope.line, format!("no assignment gives the scope {}", scope.scope.value));
            }
        }
    }

    fn table(&mut self, table: &TableConfig, table_no: i16, read: &BTreeSet<&str>) -> Option<Table> {
        let catalog = self.catalog;
        let name = &table.relation.value;
        let line = table.relation.line;
        let Some(relation) = catalog.relations.iter().find(|relation| relation.name == *name) else {
            self.problem(line, format!("relation {name} does not exist"));
            return None;
        };
        if let Some(reason) = unfit(relation) {
            self.problem(line, format!("relation {name} {reason}"));
            return None;
        }
        if relation.row_security_applies {
            self.problem(
                line,
                format!("relation {name} has row-level security that applies to this role: rows would be missing; grant it BYPASSRLS"),
            );
        }
        if !relation.readable {
            self.warning(line, format!("this role may not read relation {name}"));
        }
        let keys = self.key(table, relation)?;
        let is_key = |name: &str| keys.iter().any(|key| key.name == name);
        self.check_names(table, relation, &keys);
        let fields = self.fields(table, relation);
        let types: BTreeMap<&str, (usize, PortableType)> =
            table.types.iter().map(|(column, portable)| (column.value.as_str(), (column.line, *portable))).collect();
        let read_only: BTreeSet<&str> = table.read_only.iter().map(|column| column.value.as_str()).collect();
        let mut columns = Vec::new();
        for column in &relation.columns {
            let stored = read.contains(column.name.as_str());
            let delivered = !table.capture_only && fields.contains(column.name.as_str());
            let captured = fields.contains(column.name.as_str()) || stored || is_key(&column.name);
            if !captured || (column.generated && !is_key(&column.name)) {
                continue;
            }
            if is_reserved(&column.name) {
                self.problem(
                    line,
                    format!("column {name}.{}: names beginning with tributary_ are reserved", column.name),
                );
            }
            let portable = self.portable(table, column, types.get(column.name.as_str()).copied(), delivered);
            let decimal = column.type_info.precision_and_scale().filter(|_| portable == PortableType::Decimal);
            columns.push(Column {
                name: column.name.clone(),
                field_id: column.name.clone(),
                type_info: column.type_info.clone(),
                portable,
                nullable: !column.not_null && !is_key(&column.name),
                precision: decimal.map(|(precision, _)| precision),
                scale: decimal.map(|(_, scale)| scale),
                writable: !is_key(&column.name) && !column.identity_always && !read_only.contains(column.name.as_str()),
                delivered,
                stored,
                indexed: false,
            });
        }
        let keys: Option<Vec<usize>> =
            keys.iter().map(|key| columns.iter().position(|column| column.name == key.name)).collect();
        let lifecycle = Lifecycle {
            created_at: self.moment(table.lifecycle.created_at.as_ref(), "created_at", &columns),
            updated_at: self.moment(table.lifecycle.updated_at.as_ref(), "updated_at", &columns),
            deleted_at: self.moment(table.lifecycle.deleted_at.as_ref(), "deleted_at", &columns),
        };
        Some(Table {
            table_no,
            relation: name.clone(),
            id: table.id.value.clone(),
            capture_only: table.capture_only,
            columns,
            keys: keys?,
            lifecycle,
        })
    }

    /// The key columns: one, or of a capture-only table any number.
    fn key<'c>(&mut self, table: &TableConfig, relation: &'c CatalogRelation) -> Option<Vec<&'c CatalogColumn>> {
        let name = &table.relation.value;
        let line = table.relation.line;
        let Some(PrimaryKey { columns, deferrable }) = &relation.primary_key else {
            self.problem(line, format!("relation {name} has no primary key"));
            return None;
        };
        let mut fit = true;
        if columns.len() != 1 && !table.capture_only {
            let message = format!("relation {name} has a primary key of {} columns: it must have one", columns.len());
            self.problem(line, message);
            fit = false;
        }
        if *deferrable {
            self.problem(
                line,
                format!("relation {name} has a deferrable primary key, which identifies no row in the stream"),
            );
            fit = false;
        }
        let bad_identity = match &relation.replica_identity {
            ReplicaIdentity::Default | ReplicaIdentity::Full => None,
            ReplicaIdentity::Index(index) => {
                let differs = index.iter().collect::<BTreeSet<_>>() != columns.iter().collect::<BTreeSet<_>>();
                differs.then_some("is an index on other columns than the primary key")
            }
            ReplicaIdentity::Nothing => Some("is NOTHING"),
        };
        if let Some(reason) = bad_identity {
            self.problem(line, format!("relation {name}: its replica identity {reason}; set it to DEFAULT"));
            fit = false;
        }
        let column = |attnum: &i16| relation.columns.iter().find(|column| column.attnum == *attnum);
        let keys: Vec<&CatalogColumn> = columns.iter().map(column).collect::<Option<_>>()?;
        if let Some(key) = keys.iter().find(|key| key.generated) {
            self.problem(
                line,
                format!("relation {name}: its key {} is a generated column, which is not in the stream", key.name),
            );
            fit = false;
        }
        (fit && !keys.is_empty()).then_some(keys)
    }

    /// Every column that the table's entry names must exist and be delivered.
    fn check_names(&mut self, table: &TableConfig, relation: &CatalogRelation, keys: &[&CatalogColumn]) {
        let name = &table.relation.value;
        let listed = |column: &str| {
            table.columns.as_ref().is_none_or(|columns| columns.iter().any(|listed| listed.value == column))
        };
        if let Some(key) = keys.iter().find(|key| !listed(&key.name)).filter(|_| !table.capture_only) {
            let line = table.columns.iter().flatten().next().map_or(table.line, |column| column.line);
            self.problem(line, format!("columns of {name} lack its key {}", key.name));
        }
        let columns = table.columns.iter().flatten().map(|column| (column, "columns"));
        let types = table.types.iter().map(|(column, _)| (column, "types"));
        let read_only = table.read_only.iter().map(|column| (column, "read_only"));
        for (column, place) in columns.chain(types).chain(read_only) {
            match relation.column(&column.value) {
                None => self.problem(column.line, format!("{place}: column {} of {name} does not exist", column.value)),
                Some(found) if found.generated => self.problem(
                    column.line,
                    format!("{place}: column {} of {name} is generated, and PostgreSQL leaves such columns out of the stream", column.value),
                ),
                Some(_) if !listed(&column.value) => {
                    self.problem(column.line, format!("{place}: column {} of {name} is not among its columns", column.value));
                }
                Some(_) => {}
            }
        }
    }

    /// The names of the columns that the entry takes.
    fn fields<'c>(&mut self, table: &TableConfig, relation: &'c CatalogRelation) -> BTreeSet<&'c str> {
        let listed = |column: &&CatalogColumn| match &table.columns {
            Some(columns) => columns.iter().any(|listed| listed.value == column.name),
            None => true,
        };
        let (generated, taken): (Vec<&CatalogColumn>, Vec<&CatalogColumn>) =
            relation.columns.iter().filter(listed).partition(|column| column.generated);
        if table.columns.is_none() {
            for column in generated {
                self.warning(
                    table.relation.line,
                    format!(
                        "column {} of {} is generated and left out: PostgreSQL leaves it out of the stream",
                        column.name, table.relation.value
                    ),
                );
            }
        }
        taken.into_iter().map(|column| column.name.as_str()).collect()
    }

    fn portable(
        &mut self,
        table: &TableConfig,
        column: &CatalogColumn,
        override_: Option<(usize, PortableType)>,
        delivered: bool,
    ) -> PortableType {
        let name = &table.relation.value;
        let default = PortableType::default_for(column.type_info.base_oid);
        let portable = match override_ {
            None => default,
            Some((_, portable)) if portable == default || portable == PortableType::String => portable,
            Some((_, PortableType::Int64)) if default == PortableType::Int => PortableType::Int64,
            Some((line, portable)) => {
                let possible = match default {
                    PortableType::String => String::new(),
                    PortableType::Int => "int, int64 or ".to_owned(),
                    other => format!("{} or ", wire_name(other)),
                };
                let message = format!(
                    "types: column {} of {name} ({}) cannot be {}: it can be {possible}string",
                    column.name,
                    column.type_info.sql,
                    wire_name(portable),
                );
                self.problem(line, message);
                default
            }
        };
        if let Some(risk) = at_risk(portable).filter(|_| delivered) {
            let message = format!(
                "column {} of {name}: {risk} cannot be {}, and such a value would stop the stream; types: {{{}: string}} takes every value",
                column.name,
                wire_name(portable),
                column.name,
            );
            self.warning(table.relation.line, message);
        }
        portable
    }

    fn moment(&mut self, moment: Option<&Located<String>>, what: &str, columns: &[Column]) -> Option<usize> {
        let moment = moment?;
        let found = columns.iter().position(|column| column.delivered && column.name == moment.value);
        match found {
            None => {
                self.problem(
                    moment.line,
                    format!("lifecycle: {what} names {}, which is not among the columns", moment.value),
                );
            }
            Some(index) if columns[index].portable != PortableType::Datetime => {
                self.problem(moment.line, format!("lifecycle: {what} names {}, which is not a datetime", moment.value));
            }
            Some(_) => {}
        }
        found
    }

    /// The tables of a query; `None` when one is refused itself, and not once more for each that reads it.
    fn tables_of<'t>(&self, from: &FromClause, tables: &'t [Table]) -> Option<Vec<&'t Table>> {
        let configured = self.config.tables_of(from).ok()?;
        configured.iter().map(|table| tables.iter().find(|other| other.relation == table.relation.value)).collect()
    }

    fn look_up(&mut self, found: Vec<(usize, usize)>, tables: &[&Table]) {
        self.lookups.extend(found.into_iter().map(|(table, column)| (tables[table].relation.clone(), column)));
    }

    fn rule(&mut self, scope: &ScopeConfig, tables: &[Table]) -> Option<Rule> {
        let tables = self.tables_of(scope.query.from(), tables).filter(|_| !self.refused.contains(&scope.line))?;
        let source = RuleSource {
            scope: &scope.scope.value,
            rows: &scope.rows.value,
            max_scopes_per_row: scope.max_scopes_per_row,
            template: &scope.template,
            values: &scope.values,
            query: &scope.query,
        };
        match Rule::bind(source, &tables) {
            Ok(rule) => {
                self.look_up(scope.query.lookups(&tables), &tables);
                Some(rule)
            }
            Err(problems) => {
                let relation = &tables[scope.query.target()].relation;
                for problem in problems {
                    self.problem(scope.line, format!("rule {} over {relation}: {problem}", scope.scope.value));
                }
                None
            }
        }
    }

    fn assignment(&mut self, assignment: &AssignmentConfig, tables: &[Table]) -> Option<Assignment> {
        let query = assignment.query.as_ref()?;
        let tables = self.tables_of(query.value.from(), tables).filter(|_| !self.refused.contains(&query.line))?;
        match Assignment::bind(assignment.template.clone(), &assignment.names, &query.value, &tables) {
            Ok(bound) => {
                self.look_up(query.value.lookups(&tables), &tables);
                Some(bound)
            }
            Err(problems) => {
                for problem in problems {
                    self.problem(query.line, format!("assignment {}: {problem}", assignment.scope.value));
                }
                None
            }
        }
    }
}

/// Whether a B-tree on a column serves equality.
fn is_indexable(type_info: &ColumnType) -> bool {
    const TYPES: [u32; 21] =
        [17, 18, 19, 20, 21, 23, 25, 26, 700, 701, 829, 869, 1042, 1043, 1082, 1083, 1114, 1184, 1186, 1700, 2950];
    type_info.class == TypeClass::Enum || (type_info.class == TypeClass::Builtin && TYPES.contains(&type_info.base_oid))
}

/// Why a relation cannot be followed at all.
fn unfit(relation: &CatalogRelation) -> Option<&'static str> {
    match relation.kind {
        RelationKind::Table | RelationKind::PartitionedTable => {}
        RelationKind::View => return Some("is a view: only tables are in the stream"),
        RelationKind::MaterializedView => return Some("is a materialized view: only tables are in the stream"),
        RelationKind::ForeignTable => return Some("is a foreign table: only local tables are in the stream"),
        RelationKind::Other => return Some("is not a table"),
    }
    match relation.persistence {
        Persistence::Permanent => {}
        Persistence::Unlogged => return Some("is unlogged: it is not in the stream"),
        Persistence::Temporary => return Some("is temporary: it is not in the stream"),
    }
    relation.has_children.then_some("has tables that inherit from it: configure them as tables of their own instead")
}

/// Values of a portable type's PostgreSQL types that it cannot hold.
pub fn at_risk(portable: PortableType) -> Option<&'static str> {
    match portable {
        PortableType::Decimal | PortableType::Float => Some("NaN or Infinity"),
        PortableType::Datetime | PortableType::Date => Some("infinity, or a year before 1 or past 9999,"),
        PortableType::Time => Some("24:00:00"),
        PortableType::Json => Some("duplicate names, or an integer beyond 2^53-1,"),
        PortableType::String
        | PortableType::Int
        | PortableType::Int64
        | PortableType::Boolean
        | PortableType::Bytes => None,
    }
}

fn wire_name(portable: PortableType) -> String {
    match serde_json::to_value(portable) {
        Ok(serde_json::Value::String(name)) => name,
        _ => format!("{portable:?}"),
    }
}

#[cfg(test)]
mod tests;
