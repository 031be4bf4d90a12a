//! Rules that are evaluated without SQL: only where equality of PostgreSQL's text output is PostgreSQL's equality.
//! Logic is SQL's, with three values.

use serde::{Deserialize, Serialize};
use sqlparser::ast::{BinaryOperator, Expr, InTarget, UnaryOperator, Value};

use super::RuleError;
use super::expression::{ParsedExpression, column_of};
use super::from::FromClause;
use crate::registry::catalog::{Collation, TypeClass};
use crate::registry::{Column, Table};

const BOOL: u32 = 16;
const NAME: u32 = 19;
const INT8: u32 = 20;
const INT2: u32 = 21;
const INT4: u32 = 23;
const TEXT: u32 = 25;
const OID: u32 = 26;
const VARCHAR: u32 = 1043;
const NUMERIC: u32 = 1700;
const UUID: u32 = 2950;

/// A filter over one row.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Predicate {
    /// `true`, `false`, or null.
    Constant(Option<bool>),
    /// A boolean column.
    Column(usize),
    /// Is null.
    IsNull(usize),
    /// The column's text is this one.
    Equals(usize, String),
    /// Of a boolean: is true, is false, is unknown.
    Is(Box<Predicate>, Option<bool>),
    /// NOT.
    Not(Box<Predicate>),
    /// AND.
    And(Box<Predicate>, Box<Predicate>),
    /// OR.
    Or(Box<Predicate>, Box<Predicate>),
}

/// A value of a scope id that is a column's text.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct NativeValue {
    column: usize,
    boolean: bool,
}

fn field<'a>(row: &[Option<&'a str>], column: usize) -> Result<Option<&'a str>, RuleError> {
    row.get(column).copied().ok_or(RuleError::MissingColumn)
}

fn boolean(text: &str) -> Result<bool, RuleError> {
    match text {
        "t" => Ok(true),
        "f" => Ok(false),
        _ => Err(RuleError::NotABoolean),
    }
}

impl Predicate {
    /// The filter on a row of PostgreSQL's text output.
    pub(crate) fn evaluate(&self, row: &[Option<&str>]) -> Result<Option<bool>, RuleError> {
        Ok(match self {
            Self::Constant(value) => *value,
            Self::Column(column) => field(row, *column)?.map(boolean).transpose()?,
            Self::IsNull(column) => Some(field(row, *column)?.is_none()),
            Self::Equals(column, text) => field(row, *column)?.map(|value| value == text),
            Self::Is(inner, value) => Some(inner.evaluate(row)? == *value),
            Self::Not(inner) => inner.evaluate(row)?.map(|value| !value),
            Self::And(left, right) => match (left.evaluate(row)?, right.evaluate(row)?) {
                (Some(false), _) | (_, Some(false)) => Some(false),
                (Some(true), Some(true)) => Some(true),
                _ => None,
            },
            Self::Or(left, right) => match (left.evaluate(row)?, right.evaluate(row)?) {
                (Some(true), _) | (_, Some(true)) => Some(true),
                (Some(false), Some(false)) => Some(false),
                _ => None,
            },
        })
    }
}

impl NativeValue {
    /// The value's text, as PostgreSQL's cast to text gives it (`true` and `false`, not `t` and `f`).
    pub(crate) fn text<'a>(self, row: &[Option<&'a str>]) -> Result<Option<&'a str>, RuleError> {
        let text = field(row, self.column)?;
        if !self.boolean {
            return Ok(text);
        }
        text.map(|text| boolean(text).map(|value| if value { "true" } else { "false" })).transpose()
    }
}

/// The value without SQL, when it is a column whose output is its cast to text.
pub(super) fn value(expression: &ParsedExpression, from: &FromClause, table: &Table) -> Option<NativeValue> {
    let column = expression.bare_column(from, table)?;
    let type_info = &table.columns[column].type_info;
    let same_text = match type_info.class {
        TypeClass::Builtin => {
            matches!(type_info.base_oid, BOOL | NAME | INT8 | INT2 | INT4 | TEXT | OID | VARCHAR | NUMERIC | UUID)
        }
        TypeClass::Enum | TypeClass::Opaque => true,
        TypeClass::Composite => false,
    };
    same_text.then_some(NativeValue { column, boolean: type_info.base_oid == BOOL })
}

/// The filter without SQL, when all of it can be.
pub(super) fn filter(tree: &Expr, from: &FromClause, table: &Table) -> Option<Predicate> {
    Compiler { from, table: &table.columns }.predicate(tree)
}

struct Compiler<'a> {
    from: &'a FromClause,
    table: &'a [Column],
}

impl Compiler<'_> {
    fn column(&self, tree: &Expr) -> Option<usize> {
        let path = column_of(tree)?;
        let (name, prefix) = path.split_last()?;
        let ours = prefix.is_empty() || !self.from.matching(prefix).is_empty();
        self.table.iter().position(|column| ours && column.name == *name)
    }

    fn predicate(&self, tree: &Expr) -> Option<Predicate> {
        Some(match tree {
            Expr::Nested(inner) => self.predicate(inner)?,
            Expr::Identifier(_) | Expr::CompoundIdentifier(_) => {
                let column = self.column(tree)?;
                if self.table[column].type_info.base_oid != BOOL {
                    return None;
                }
                Predicate::Column(column)
            }
            Expr::Value(value) => match value.value {
                Value::Boolean(value) => Predicate::Constant(Some(value)),
                Value::Null => Predicate::Constant(None),
                _ => return None,
            },
            Expr::IsNull(inner) => self.is_null(inner)?,
            Expr::IsNotNull(inner) => Predicate::Not(Box::new(self.is_null(inner)?)),
            Expr::IsTrue(inner) => self.is(inner, Some(true))?,
            Expr::IsFalse(inner) => self.is(inner, Some(false))?,
            Expr::IsUnknown(inner) => self.is(inner, None)?,
            Expr::IsNotTrue(inner) => Predicate::Not(Box::new(self.is(inner, Some(true))?)),
            Expr::IsNotFalse(inner) => Predicate::Not(Box::new(self.is(inner, Some(false))?)),
            Expr::IsNotUnknown(inner) => Predicate::Not(Box::new(self.is(inner, None)?)),
            Expr::UnaryOp { op: UnaryOperator::Not, expr } => Predicate::Not(Box::new(self.predicate(expr)?)),
            Expr::BinaryOp { left, op, right } => match op {
                BinaryOperator::And => {
                    Predicate::And(Box::new(self.predicate(left)?), Box::new(self.predicate(right)?))
                }
                BinaryOperator::Or => Predicate::Or(Box::new(self.predicate(left)?), Box::new(self.predicate(right)?)),
                BinaryOperator::Eq => self.equals(left, right)?,
                BinaryOperator::NotEq => Predicate::Not(Box::new(self.equals(left, right)?)),
                _ => return None,
            },
            Expr::In { expr, target: InTarget::List(list), negated, global: false } => {
                let mut equal = Predicate::Constant(Some(false));
                for value in list {
                    equal = Predicate::Or(Box::new(equal), Box::new(self.equals(expr, value)?));
                }
                if *negated { Predicate::Not(Box::new(equal)) } else { equal }
            }
            _ => return None,
        })
    }

    fn is(&self, inner: &Expr, value: Option<bool>) -> Option<Predicate> {
        Some(Predicate::Is(Box::new(self.predicate(inner)?), value))
    }

    /// Composite values, which are null to SQL when their fields are, do not reach here: no rule may read them.
    fn is_null(&self, tree: &Expr) -> Option<Predicate> {
        self.column(tree).map(Predicate::IsNull)
    }

    fn equals(&self, left: &Expr, right: &Expr) -> Option<Predicate> {
        let (column, literal) = match (self.column(left), self.column(right)) {
            (Some(column), None) => (column, right),
            (None, Some(column)) => (column, left),
            _ => return None,
        };
        literal_text(&self.table[column], literal).map(|text| Predicate::Equals(column, text))
    }
}

/// The one text output of the column's values that equal the literal.
fn literal_text(column: &Column, literal: &Expr) -> Option<String> {
    let type_info = &column.type_info;
    let (value, negative) = match literal {
        Expr::Nested(inner) => return literal_text(column, inner),
        Expr::UnaryOp { op: UnaryOperator::Minus, expr } => match expr.as_ref() {
            Expr::Value(value) => (&value.value, true),
            _ => return None,
        },
        Expr::Value(value) => (&value.value, false),
        _ => return None,
    };
    if type_info.class == TypeClass::Opaque
        || type_info.class == TypeClass::Composite
        || type_info.collation == Collation::Foreign
    {
        return None;
    }
    let is_text = type_info.class == TypeClass::Enum || matches!(type_info.base_oid, TEXT | VARCHAR);
    match (value, type_info.base_oid) {
        (_, BOOL) if negative => None,
        (Value::Boolean(value), BOOL) => Some(if *value { "t" } else { "f" }.to_owned()),
        (Value::SingleQuotedString(text), BOOL) => match text.as_str() {
            "t" | "true" => Some("t".to_owned()),
            "f" | "false" => Some("f".to_owned()),
            _ => None,
        },
        (Value::Number(digits, false), INT2 | INT4 | INT8) => integer_text(digits, negative),
        (Value::SingleQuotedString(text), INT2 | INT4 | INT8) if !negative => {
            let canonical = match type_info.base_oid {
                INT2 => text.parse::<i16>().map(|n| n.to_string()),
                INT4 => text.parse::<i32>().map(|n| n.to_string()),
                _ => text.parse::<i64>().map(|n| n.to_string()),
            };
            canonical.ok().filter(|canonical| canonical == text)
        }
        (Value::SingleQuotedString(text), UUID) if !negative => {
            let canonical = uuid::Uuid::parse_str(text).ok()?.hyphenated().to_string();
            (canonical == *text).then_some(canonical)
        }
        (Value::SingleQuotedString(text), _) if is_text && !negative => Some(text.clone()),
        _ => None,
    }
}

/// The canonical text of an integer literal. One beyond bigint is fine: no column's value equals it, nor its text.
fn integer_text(digits: &str, negative: bool) -> Option<String> {
    if digits.is_empty() || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let significant = digits.trim_start_matches('0');
    Some(match (significant, negative) {
        ("", _) => "0".to_owned(),
        (digits, true) => format!("-{digits}"),
        (digits, false) => digits.to_owned(),
    })
}
