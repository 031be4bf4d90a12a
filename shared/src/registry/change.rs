//! What a changed configuration asks for: which tables are copied, which scopes get a new membership generation, how the
//! manifest follows. Pure: two registries in, a difference out.
//!
//! Rules are compared as they are written and not as they are bound: a new column moves the places of others, which
//! changes no membership. Deliberately absent: relations that were dropped and made anew, which no registry can tell.

use std::collections::BTreeSet;
use std::fmt;

use serde::Serialize;

use super::{Column, Registry, Table};
use crate::manifest::{self, TransitionClass};
use crate::rule::Rule;

/// What becomes of a table's projection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TableAction {
    /// It is new: copied from the source.
    Added,
    /// It goes, with its entries.
    Removed,
    /// What is captured of it differs: copied from the source anew.
    Copied,
}

/// One table that differs.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct TableChange {
    /// The relation.
    pub relation: String,
    /// What becomes of its projection.
    pub action: TableAction,
    /// What differs, in the order of the columns.
    pub why: Vec<String>,
}

/// How the manifest follows the published one.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct SchemaChange {
    /// The class of the transition.
    pub class: TransitionClass,
    /// Ids of the tables with a difference of class 3 or 4.
    pub affected_tables: Vec<String>,
}

/// The difference of two registries.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Change {
    /// Tables that are added, removed or copied.
    pub tables: Vec<TableChange>,
    /// Scope templates of rules that are new.
    pub rules_added: Vec<String>,
    /// Scope templates of rules that go.
    pub rules_removed: Vec<String>,
    /// Templates whose scopes can get a new membership generation: their rules, or what these read, differ. Of these, a
    /// scope whose content stays as it is keeps its own.
    pub scopes: Vec<String>,
    /// Assignments differ.
    pub assignments: bool,
    /// How the manifest follows; absent when the published one stays.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schema: Option<SchemaChange>,
    /// Something differs that none of the above shows, such as an index or the order of the file.
    pub other: bool,
}

impl Change {
    /// What leads from the registry in force to another, whose tables keep their numbers.
    pub fn between(old: &Registry, new: &Registry) -> Self {
        let mut tables: Vec<TableChange> = new.tables.iter().filter_map(|table| table_change(old, table)).collect();
        let gone = old.tables.iter().filter(|table| new.table(table.table_no).is_none());
        tables.extend(gone.map(|table| TableChange {
            relation: table.relation.to_string(),
            action: TableAction::Removed,
            why: Vec::new(),
        }));
        let lacks = |registry: &Registry, rule: &Rule| !registry.rules.iter().any(|other| same_rule(other, rule));
        let added: Vec<&Rule> = new.rules.iter().filter(|rule| lacks(old, rule)).collect();
        let removed: Vec<&Rule> = old.rules.iter().filter(|rule| lacks(new, rule)).collect();
        let moved: BTreeSet<i16> = old
            .tables
            .iter()
            .chain(&new.tables)
            .filter(|table| tables.iter().any(|change| change.relation == table.relation.to_string()))
            .map(|table| table.table_no)
            .collect();
        let reads_moved = |rule: &&Rule| rule.from().iter().any(|number| moved.contains(number));
        let scopes: BTreeSet<&str> = added
            .iter()
            .chain(&removed)
            .copied()
            .chain(old.rules.iter().chain(&new.rules).filter(reads_moved))
            .map(|rule| rule.scope.as_str())
            .collect();
        let transition = manifest::classify(&old.manifest_tables(), &new.manifest_tables());
        let templates = |rules: &[&Rule]| rules.iter().map(|rule| rule.scope.clone()).collect::<Vec<_>>();
        let mut change = Self {
            rules_added: templates(&added),
            rules_removed: templates(&removed),
            scopes: scopes.into_iter().map(ToOwned::to_owned).collect(),
            assignments: old.assignments != new.assignments,
            schema: transition.map(|transition| SchemaChange {
                class: transition.class,
                affected_tables: transition.affected.into_iter().collect(),
            }),
            tables,
            other: false,
        };
        change.other = change.is_empty() && old != new;
        change
    }

    /// Whether nothing differs.
    pub fn is_empty(&self) -> bool {
        self.tables.is_empty()
            && self.rules_added.is_empty()
            && self.rules_removed.is_empty()
            && !self.assignments
            && self.schema.is_none()
            && !self.other
    }
}

/// Whether two rules give the same scopes to the same rows, as far as their texts say.
fn same_rule(one: &Rule, other: &Rule) -> bool {
    (&one.scope, &one.rows, one.max_scopes_per_row, one.from(), one.table_no)
        == (&other.scope, &other.rows, other.max_scopes_per_row, other.from(), other.table_no)
}

fn table_change(old: &Registry, table: &Table) -> Option<TableChange> {
    let relation = table.relation.to_string();
    let Some(former) = old.table(table.table_no) else {
        return Some(TableChange { relation, action: TableAction::Added, why: Vec::new() });
    };
    let mut why = Vec::new();
    if former.capture_only != table.capture_only {
        why.push(if table.capture_only { "is no longer delivered" } else { "is delivered now" }.to_owned());
    }
    if former.id != table.id {
        why.push(format!("its id {} becomes {}", former.id, table.id));
    }
    let keys = |table: &Table| table.keys.iter().map(|key| table.columns[*key].name.clone()).collect::<Vec<_>>();
    if keys(former) != keys(table) {
        why.push("it has another key".to_owned());
    }
    for column in &table.columns {
        match former.columns.iter().find(|former| former.name == column.name) {
            None => why.push(format!("column {} is new", column.name)),
            Some(former) => why.extend(column_change(former, column)),
        }
    }
    for column in &former.columns {
        if !table.columns.iter().any(|other| other.name == column.name) {
            why.push(format!("column {} goes", column.name));
        }
    }
    (!why.is_empty()).then_some(TableChange { relation, action: TableAction::Copied, why })
}

/// What of a column's difference the projection cannot answer by itself.
fn column_change(old: &Column, new: &Column) -> Option<String> {
    let name = &new.name;
    if old.type_info != new.type_info || (old.precision, old.scale) != (new.precision, new.scale) {
        Some(format!("column {name} has another type"))
    } else if old.portable != new.portable {
        Some(format!("column {name} has another portable type"))
    } else if old.field_id != new.field_id {
        Some(format!("column {name} has another field id"))
    } else if old.delivered != new.delivered {
        Some(format!("column {name} {}", if new.delivered { "is delivered now" } else { "is no longer delivered" }))
    } else if !old.stored && new.stored {
        Some(format!("column {name} is read by a rule or an assignment now"))
    } else {
        None
    }
}

impl fmt::Display for Change {
    /// One fact a line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return writeln!(f, "nothing differs from the configuration in force");
        }
        for table in &self.tables {
            let action = match table.action {
                TableAction::Added => "is added, and copied from the source",
                TableAction::Removed => "is removed",
                TableAction::Copied => "is copied anew",
            };
            write!(f, "table {} {action}", table.relation)?;
            if !table.why.is_empty() {
                write!(f, ": {}", table.why.join(", "))?;
            }
            writeln!(f)?;
        }
        for scope in &self.rules_removed {
            writeln!(f, "a rule of {scope} goes")?;
        }
        for scope in &self.rules_added {
            writeln!(f, "a rule of {scope} is new")?;
        }
        for scope in &self.scopes {
            writeln!(f, "scopes {scope} get a new membership generation where their content differs")?;
        }
        if self.assignments {
            writeln!(f, "assignments differ")?;
        }
        match &self.schema {
            None => writeln!(f, "the published manifest stays")?,
            Some(SchemaChange { class, affected_tables }) => {
                let (class, effect) = match class {
                    TransitionClass::Initial => ("initial", "every client rebuilds"),
                    TransitionClass::Class2 => ("class 2", "clients replace their schema and keep their rows"),
                    TransitionClass::Class3 => ("class 3", "clients rebuild the scopes that hold rows of"),
                    TransitionClass::Class4 => {
                        ("class 4", "clients of the former manifest are incompatible; it is about")
                    }
                };
                write!(f, "a new manifest of {class}: {effect}")?;
                if !affected_tables.is_empty() {
                    write!(f, " {}", affected_tables.join(", "))?;
                }
                writeln!(f)?;
            }
        }
        if self.other {
            writeln!(f, "what differs changes neither rows, scopes nor assignments")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
