//! Membership by SQL over the projections, in sets: which rows a change can affect, in which scopes they are, and the
//! effects that follow (ADR 003, "Stream position and common terms": deterministic per-scope effect ordinals).
//!
//! A table that a rule with joins delivers is handled here whole, its other rules included. Tables that such rules only
//! read are written as any other; where an effect of theirs and effects that follow from it fall on one event in one
//! scope, they are numbered anew together. Scratch tables are temporary ones of the session, emptied by each commit:
//! memory stays flat whatever the number of rows that a change affects.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use deadpool_postgres::{GenericClient, Transaction};
use futures_util::{Stream, TryStreamExt};
use tokio_postgres::types::ToSql;

use super::error::{Result, StoreError};
use super::{projection, statement};
use crate::position::{MAX_EFFECTS, Position};
use crate::registry::name::quote_identifier;
use crate::registry::{Registry, Table};
use crate::rule::{Reference, Rule, SqlExpression};
use crate::template::{MAX_SCOPE_ID_CHARACTERS, Template};

/// Bits of a stored ordinal that hold the effect ordinal.
const EFFECT_BITS: u32 = MAX_EFFECTS.trailing_zeros();

/// The tables that rules with joins read, and the statements that evaluate membership of those that are delivered.
#[derive(Debug)]
pub struct Membership {
    concerned: BTreeSet<i16>,
    targets: Vec<Target>,
    bystanders: Vec<Bystander>,
    impacts: Vec<Impact>,
}

/// A table whose membership is evaluated here.
#[derive(Debug)]
struct Target {
    table_no: i16,
    relation: String,
    projection: String,
    /// Of its rows' identities among those of all tables.
    rank: i32,
    rules: Vec<Evaluation>,
}

/// A delivered table that rules with joins read, while its own rules have none.
#[derive(Debug)]
struct Bystander {
    table_no: i16,
    projection: String,
    rank: i32,
}

/// A rule of a target.
#[derive(Debug)]
struct Evaluation {
    sql: String,
    bound: i64,
}

/// How a change of a relation's rows reaches rows of a target through one place of the relation in a rule's FROM.
#[derive(Debug)]
struct Impact {
    changed: i16,
    target: i16,
    relation: String,
    /// Of some rows.
    sql: String,
    /// Of all rows.
    all_sql: String,
}

/// A row of a batch that a rule with joins reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Changed {
    /// Interned number.
    pub row_id: i64,
    /// The last event that touched it.
    pub position: Position,
}

/// A row that is in more scopes than a rule's bound, or in one whose id is impossible.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{relation}: {detail}")]
pub struct Violation {
    /// The relation of the row.
    pub relation: String,
    /// What is wrong, without values.
    pub detail: String,
}

/// An evaluation that the database refused, with the relation whose membership it is.
#[derive(Debug, thiserror::Error)]
#[error("{relation}: {error}")]
pub struct Refused {
    /// The relation whose membership was evaluated.
    pub relation: String,
    /// What the database said.
    pub error: StoreError,
}

/// SQL of a value with `%`, `:` and control characters percent-encoded, exactly as [`Template::scope_id`] does.
pub fn encoded(value: &str) -> String {
    format!(
        "case when {value} ~ '[%:\\u0001-\\u001f\\u007f-\\u009f]' then (
            select string_agg(
                case when c.c ~ '[%:\\u0001-\\u001f\\u007f-\\u009f]'
                    then upper(regexp_replace(encode(convert_to(c.c, 'UTF8'), 'hex'), '(..)', '%\\1', 'g'))
                    else c.c
                end, '' order by c.n)
            from string_to_table({value}, null) with ordinality as c (c, n)
        ) else {value} end"
    )
}

/// SQL of a scope id of the values `r.v0`, `r.v1`, …
fn scope_id(template: &Template) -> String {
    let mut parts = Vec::new();
    for (index, literal) in template.literals().iter().enumerate() {
        if index > 0 {
            parts.push(encoded(&format!("r.v{}", index - 1)));
        }
        if !literal.is_empty() || index == 0 {
            parts.push(format!("{}::text", super::session::quote_literal(literal)));
        }
    }
    parts.join("\n        || ")
}

fn column_of(tables: &[&Table], reference: Reference) -> String {
    match reference {
        Reference::Column(table, column) => {
            format!("t{table}.{}", quote_identifier(&tables[table].columns[column].name))
        }
        // Rules have no parameters.
        Reference::UserId | Reference::Claims => "null".to_owned(),
    }
}

/// `, projection as t0, …`
fn from(tables: &[&Table]) -> String {
    tables.iter().enumerate().fold(String::new(), |mut sql, (index, table)| {
        let _ = write!(sql, ",\n        {} as t{index}", projection::name(table));
        sql
    })
}

fn conditions(tables: &[&Table], conditions: &[SqlExpression]) -> String {
    conditions.iter().fold(String::new(), |mut sql, condition| {
        // The line break ends a comment at the condition's end.
        let _ = write!(sql, "\n        and ({}\n        )", condition.render(|reference| column_of(tables, reference)));
        sql
    })
}

const KEEP_LATEST: &str = "on conflict (row_id) do update
        set commit_lsn = case when (excluded.commit_lsn, excluded.ordinal) > (a.commit_lsn, a.ordinal)
                then excluded.commit_lsn else a.commit_lsn end,
            ordinal = case when (excluded.commit_lsn, excluded.ordinal) > (a.commit_lsn, a.ordinal)
                then excluded.ordinal else a.ordinal end,
            direct = a.direct or excluded.direct
        where (excluded.commit_lsn, excluded.ordinal) > (a.commit_lsn, a.ordinal)
            or (excluded.direct and not a.direct)";

impl Evaluation {
    fn new(rule: &Rule, rule_no: usize, tables: &[&Table]) -> Self {
        let mut sql = format!(
            "-- membership::evaluate
    insert into pg_temp.tributary_wanted (row_id, rule_no, scope_id)
    select r.row_id, {rule_no}, {}
    from (
        select distinct t{}.tributary_row_id as row_id",
            scope_id(rule.template()),
            rule.target()
        );
        for (number, value) in rule.values().iter().enumerate() {
            let value = value.render(|reference| column_of(tables, reference));
            let _ = write!(sql, ", ({value}\n        )::text as v{number}");
        }
        let _ = write!(
            sql,
            "\n        from pg_temp.tributary_affected a{}
        where a.table_no = $1 and t{}.tributary_row_id = a.row_id{}
    ) as r
    where true",
            from(tables),
            rule.target(),
            conditions(tables, rule.conditions())
        );
        for number in 0..rule.values().len() {
            let _ = write!(sql, " and r.v{number} is not null");
        }
        Self { sql, bound: i64::from(rule.max_scopes_per_row) }
    }
}

impl Impact {
    fn new(rule: &Rule, tables: &[&Table], through: usize) -> Self {
        let target = rule.target();
        let (from, conditions) = (from(tables), conditions(tables, rule.conditions()));
        let sql = format!(
            "-- membership::impact
    insert into pg_temp.tributary_affected as a (row_id, table_no, commit_lsn, ordinal, direct)
    select distinct on (t{target}.tributary_row_id)
        t{target}.tributary_row_id, $1::smallint, u.lsn, u.ordinal, false
    from unnest($2::bigint[], $3::bigint[], $4::bigint[]) as u (row_id, lsn, ordinal){from}
    where t{through}.tributary_row_id = u.row_id{conditions}
    order by t{target}.tributary_row_id, u.lsn desc, u.ordinal desc
    {KEEP_LATEST}"
        );
        let all_sql = format!(
            "-- membership::impact_of_all
    insert into pg_temp.tributary_affected as a (row_id, table_no, commit_lsn, ordinal, direct)
    select distinct t{target}.tributary_row_id, $1::smallint, $2::bigint, $3::bigint, false
    from {}
    where true{conditions}
    {KEEP_LATEST}",
            from.trim_start_matches(',')
        );
        Self {
            changed: tables[through].table_no,
            target: rule.table_no,
            relation: tables[target].relation.to_string(),
            sql,
            all_sql,
        }
    }
}

impl Membership {
    /// What the rules with joins of a registry make necessary; `identity_order` are its tables' numbers in the order of
    /// their rows' identities.
    pub fn new(registry: &Registry, identity_order: &[i16]) -> Self {
        let tables_of =
            |rule: &Rule| -> Vec<&Table> { rule.from().iter().filter_map(|number| registry.table(*number)).collect() };
        let joins = || registry.rules.iter().filter(|rule| rule.has_joins());
        let concerned: BTreeSet<i16> = joins().flat_map(|rule| rule.from().iter().copied()).collect();
        let impacts = joins()
            .flat_map(|rule| {
                let tables = tables_of(rule);
                // A changed row of the target itself is evaluated anyway.
                let places = (0..tables.len()).filter(|place| *place != rule.target()).collect::<Vec<_>>();
                places.into_iter().map(move |place| Impact::new(rule, &tables, place))
            })
            .collect();
        let is_target = |table: &&Table| registry.rules_of(table.table_no).any(Rule::has_joins);
        let rank = |table: &Table| identity_order.iter().position(|number| *number == table.table_no).unwrap_or(0);
        let targets = registry
            .tables
            .iter()
            .filter(is_target)
            .map(|table| Target {
                table_no: table.table_no,
                relation: table.relation.to_string(),
                projection: projection::name(table),
                rank: rank(table) as i32,
                rules: registry
                    .rules_of(table.table_no)
                    .enumerate()
                    .map(|(number, rule)| Evaluation::new(rule, number, &tables_of(rule)))
                    .collect(),
            })
            .collect();
        let bystanders = registry
            .tables
            .iter()
            .filter(|table| concerned.contains(&table.table_no) && !is_target(table) && !table.capture_only)
            .map(|table| Bystander {
                table_no: table.table_no,
                projection: projection::name(table),
                rank: rank(table) as i32,
            })
            .collect();
        Self { concerned, targets, bystanders, impacts }
    }

    /// Whether a rule with joins reads the table.
    pub fn concerns(&self, table_no: i16) -> bool {
        self.concerned.contains(&table_no)
    }

    /// Whether membership of the table's rows is evaluated here.
    pub fn evaluates(&self, table_no: i16) -> bool {
        self.targets.iter().any(|target| target.table_no == table_no)
    }

    /// The tables whose membership is evaluated here.
    pub fn evaluated(&self) -> impl Iterator<Item = i16> {
        self.targets.iter().map(|target| target.table_no)
    }

    /// Makes the scratch tables of the session, empty at the begin of a transaction, and lets each statement be planned
    /// for the rows that it meets: a plan for one affected row is no plan for all of them.
    pub async fn open(&self, db: &Transaction<'_>) -> Result<()> {
        db.batch_execute(
            "-- membership::open
            set local plan_cache_mode = force_custom_plan;
            set local client_min_messages = warning;
            create temporary table if not exists tributary_affected (
                row_id bigint not null primary key,
                table_no smallint not null,
                commit_lsn bigint not null,
                ordinal bigint not null,
                direct boolean not null
            ) on commit delete rows;
            create temporary table if not exists tributary_wanted (
                row_id bigint not null,
                rule_no integer not null,
                scope_id text not null
            ) on commit delete rows;
            create temporary table if not exists tributary_effect (
                scope_no integer not null,
                commit_lsn bigint not null,
                event bigint not null,
                rank integer not null,
                key bytea not null,
                present boolean not null,
                row_id bigint not null,
                table_no smallint not null
            ) on commit delete rows",
        )
        .await?;
        Ok(())
    }

    /// Notes the rows of targets that combinations with changed rows of a relation reach, on the present state of the
    /// projections. Called before they are written and after. Returns whether there are any.
    pub async fn impact(
        &self,
        db: &impl GenericClient,
        table_no: i16,
        changed: &[Changed],
    ) -> std::result::Result<bool, Refused> {
        let (row_ids, lsns, ordinals) = arrays(changed);
        let mut any = false;
        for impact in self.impacts.iter().filter(|impact| impact.changed == table_no && !changed.is_empty()) {
            let parameters: [&(dyn ToSql + Sync); 4] = [&impact.target, &row_ids, &lsns, &ordinals];
            any |= statement::execute(db, &impact.sql, &parameters).await.map_err(|e| impact.refused(e))? > 0;
        }
        Ok(any)
    }

    /// [`Self::impact`] of all rows of a relation, before a TRUNCATE.
    pub async fn impact_of_all(
        &self,
        db: &impl GenericClient,
        table_no: i16,
        event: Position,
    ) -> std::result::Result<bool, Refused> {
        let (lsn, ordinal) = event.to_sql();
        let mut any = false;
        for impact in self.impacts.iter().filter(|impact| impact.changed == table_no) {
            let parameters: [&(dyn ToSql + Sync); 3] = [&impact.target, &lsn, &ordinal];
            any |= statement::execute(db, &impact.all_sql, &parameters).await.map_err(|e| impact.refused(e))? > 0;
        }
        Ok(any)
    }

    /// Notes changed rows of a target.
    pub async fn note(&self, db: &impl GenericClient, table_no: i16, changed: &[Changed]) -> Result<()> {
        let (row_ids, lsns, ordinals) = arrays(changed);
        let sql = format!(
            "-- membership::note
            insert into pg_temp.tributary_affected as a (row_id, table_no, commit_lsn, ordinal, direct)
            select u.row_id, $1::smallint, u.lsn, u.ordinal, true
            from unnest($2::bigint[], $3::bigint[], $4::bigint[]) as u (row_id, lsn, ordinal)
            {KEEP_LATEST}"
        );
        statement::execute(db, &sql, &[&table_no, &row_ids, &lsns, &ordinals]).await?;
        Ok(())
    }

    /// Notes all rows of a target, before a TRUNCATE.
    pub async fn note_all(&self, db: &impl GenericClient, table: &Table, event: Position) -> Result<()> {
        let (lsn, ordinal) = event.to_sql();
        let sql = format!(
            "-- membership::note_all
            insert into pg_temp.tributary_affected as a (row_id, table_no, commit_lsn, ordinal, direct)
            select p.tributary_row_id, $1::smallint, $2::bigint, $3::bigint, true
            from {} p
            {KEEP_LATEST}",
            projection::name(table)
        );
        statement::execute(db, &sql, &[&table.table_no, &lsn, &ordinal]).await?;
        Ok(())
    }

    /// Notes rows of a target for a baseline: those of a range of numbers, from `first` on. Returns the number after
    /// them; `None` when there are none left.
    pub async fn note_range(
        &self,
        db: &impl GenericClient,
        table: &Table,
        first: i64,
        rows: i64,
    ) -> Result<Option<i64>> {
        let sql = format!(
            "-- membership::note_range
            with noted as (
                insert into pg_temp.tributary_affected (row_id, table_no, commit_lsn, ordinal, direct)
                select p.tributary_row_id, $1::smallint, 0, 0, true
                from {} p
                where p.tributary_row_id >= $2
                order by p.tributary_row_id
                limit $3
                returning row_id
            )
            select max(row_id) + 1 from noted",
            projection::name(table)
        );
        Ok(statement::query_one(db, &sql, &[&table.table_no, &first, &rows]).await?.try_get(0)?)
    }

    /// Empties the scratch tables inside a transaction, between the ranges of a baseline.
    pub async fn forget_noted(&self, db: &impl GenericClient) -> Result<()> {
        db.batch_execute("-- membership::forget_noted\ntruncate pg_temp.tributary_affected, pg_temp.tributary_wanted")
            .await?;
        Ok(())
    }

    /// Evaluates all rules of the targets that have noted rows. The scopes' ids are kept for [`Self::write`].
    pub async fn evaluate(&self, db: &impl GenericClient) -> std::result::Result<Option<Violation>, Refused> {
        for target in &self.targets {
            let refused = |error| Refused { relation: target.relation.clone(), error };
            for rule in &target.rules {
                statement::execute(db, &rule.sql, &[&target.table_no]).await.map_err(refused)?;
            }
            if let Some(detail) = target.violation(db).await.map_err(refused)? {
                return Ok(Some(Violation { relation: target.relation.clone(), detail }));
            }
        }
        Ok(None)
    }

    /// The scopes of the evaluation that are not interned; streamed.
    pub async fn unknown_scopes<C: GenericClient>(
        &self,
        db: &C,
    ) -> Result<impl Stream<Item = Result<String>> + use<C>> {
        let sql = "-- membership::unknown_scopes
            select distinct w.scope_id
            from pg_temp.tributary_wanted w
            where not exists (select from tributary.scope s where s.scope_id = w.scope_id)";
        let statement = db.prepare_cached(sql).await?;
        let none: [&(dyn ToSql + Sync); 0] = [];
        let rows = db.query_raw(&statement, none).await?;
        Ok(rows.map_err(StoreError::from).and_then(|row| async move { Ok(row.try_get(0)?) }))
    }

    /// Writes the effects: a changed row has one in each scope that it is or was in, a row that a change reached only
    /// where its membership differs. Their ordinals follow the rows' identities within each event and scope.
    ///
    /// # Errors
    /// [`StoreError::Integrity`] when a scope is not interned.
    pub async fn write(&self, db: &impl GenericClient) -> Result<Option<Violation>> {
        for target in &self.targets {
            target.effects(db).await?;
        }
        for bystander in &self.bystanders {
            bystander.effects(db).await?;
        }
        let sql = format!(
            "-- membership::write
            with numbered as (
                select *, row_number() over (
                    partition by scope_no, commit_lsn, event order by rank, key, present
                ) - 1 as effect
                from pg_temp.tributary_effect
            ), written as (
                insert into tributary.scope_entry (row_id, commit_lsn, ordinal, scope_no, table_no, present, seal)
                select row_id, commit_lsn, (event << {EFFECT_BITS}) + effect, scope_no, table_no, present,
                    tributary.entry_seal(row_id, commit_lsn, (event << {EFFECT_BITS}) + effect, scope_no, table_no,
                        present)
                from numbered
                where effect < $1
                on conflict on constraint scope_entry_row_is_key do update
                set commit_lsn = excluded.commit_lsn, ordinal = excluded.ordinal, present = excluded.present,
                    seal = excluded.seal
            )
            select coalesce(max(effect) >= $1, false), (array_agg(table_no))[1] from numbered where effect >= $1"
        );
        let row = statement::query_one(db, &sql, &[&i64::from(MAX_EFFECTS)]).await?;
        if !row.try_get::<_, bool>(0)? {
            return Ok(None);
        }
        let table_no: Option<i16> = row.try_get(1)?;
        let target = self.targets.iter().find(|target| Some(target.table_no) == table_no);
        let relation = target.map(|target| target.relation.clone()).unwrap_or_default();
        Ok(Some(Violation { relation, detail: format!("one event has more than {MAX_EFFECTS} effects in a scope") }))
    }

    /// Writes the entries of a baseline: every scope of the evaluation, at the generation start.
    pub async fn write_baseline(&self, db: &impl GenericClient, table_no: i16) -> Result<u64> {
        let sql = "-- membership::write_baseline
            insert into tributary.scope_entry (row_id, commit_lsn, ordinal, scope_no, table_no, present, seal)
            select distinct w.row_id, 0::bigint, 0::bigint, s.scope_no, $1::smallint, true,
                tributary.entry_seal(w.row_id, 0, 0, s.scope_no, $1::smallint, true)
            from pg_temp.tributary_wanted w
            join tributary.scope s on s.scope_id = w.scope_id";
        statement::execute(db, sql, &[&table_no]).await
    }
}

impl Impact {
    fn refused(&self, error: StoreError) -> Refused {
        Refused { relation: self.relation.clone(), error }
    }
}

impl Bystander {
    /// Collects the effects, written already, that fall on an event and scope of the targets' effects.
    async fn effects(&self, db: &impl GenericClient) -> Result<()> {
        let sql = format!(
            "-- membership::bystander_effects
            insert into pg_temp.tributary_effect (scope_no, commit_lsn, event, rank, key, present, row_id, table_no)
            select f.scope_no, f.commit_lsn, f.event, $2::integer, coalesce(p.tributary_key, d.key), e.present, e.row_id,
                e.table_no
            from (select distinct scope_no, commit_lsn, event from pg_temp.tributary_effect) f
            join tributary.scope_entry e on e.scope_no = f.scope_no and e.commit_lsn = f.commit_lsn
                and e.ordinal >= f.event << {EFFECT_BITS} and e.ordinal < (f.event + 1) << {EFFECT_BITS}
            left join {} p on p.tributary_row_id = e.row_id
            left join tributary.departed_row d on d.row_id = e.row_id
            where e.table_no = $1",
            self.projection
        );
        statement::execute(db, &sql, &[&self.table_no, &self.rank]).await?;
        Ok(())
    }
}

impl Target {
    /// What is wrong with the evaluation of the noted rows.
    async fn violation(&self, db: &impl GenericClient) -> Result<Option<String>> {
        let bounds: Vec<i64> = self.rules.iter().map(|rule| rule.bound).collect();
        let sql = format!(
            "-- membership::violation
            select
                (select b.bound
                from pg_temp.tributary_wanted w
                join pg_temp.tributary_affected a on a.row_id = w.row_id and a.table_no = $1
                join unnest($2::bigint[]) with ordinality as b (bound, number) on b.number = w.rule_no + 1
                group by w.row_id, w.rule_no, b.bound
                having count(*) > b.bound
                limit 1),
                exists (
                    select from pg_temp.tributary_wanted w
                    join pg_temp.tributary_affected a on a.row_id = w.row_id and a.table_no = $1
                    where char_length(w.scope_id) not between 1 and {MAX_SCOPE_ID_CHARACTERS}
                )"
        );
        let row = statement::query_one(db, &sql, &[&self.table_no, &bounds]).await?;
        if let Some(bound) = row.try_get::<_, Option<i64>>(0)? {
            return Ok(Some(format!("a row is in more than {bound} scopes of a rule")));
        }
        if row.try_get(1)? {
            return Ok(Some(format!("a scope id is empty or longer than {MAX_SCOPE_ID_CHARACTERS} characters")));
        }
        Ok(None)
    }

    /// Collects the effects of the noted rows.
    async fn effects(&self, db: &impl GenericClient) -> Result<()> {
        let sql = format!(
            "-- membership::effects
            insert into pg_temp.tributary_effect (scope_no, commit_lsn, event, rank, key, present, row_id, table_no)
            with is_in as (
                select distinct w.row_id, s.scope_no
                from pg_temp.tributary_wanted w
                join pg_temp.tributary_affected a on a.row_id = w.row_id and a.table_no = $1
                join tributary.scope s on s.scope_id = w.scope_id
            ), was_in as (
                select e.row_id, e.scope_no
                from pg_temp.tributary_affected a
                join tributary.scope_entry e on e.row_id = a.row_id and e.present
                where a.table_no = $1
            ), compared as (
                select row_id, scope_no, i.here as is_here, w.here as was_here
                from (select row_id, scope_no, true as here from is_in) as i
                full join (select row_id, scope_no, true as here from was_in) as w using (row_id, scope_no)
            )
            select c.scope_no, a.commit_lsn, a.ordinal >> {EFFECT_BITS}, $2::integer,
                coalesce(p.tributary_key, d.key), c.is_here is not null, c.row_id, a.table_no
            from compared c
            join pg_temp.tributary_affected a on a.row_id = c.row_id
            left join {} p on p.tributary_row_id = c.row_id
            left join tributary.departed_row d on d.row_id = c.row_id
            where a.direct or c.is_here is distinct from c.was_here",
            self.projection
        );
        statement::execute(db, &sql, &[&self.table_no, &self.rank]).await?;
        Ok(())
    }
}

fn arrays(changed: &[Changed]) -> (Vec<i64>, Vec<i64>, Vec<i64>) {
    let row_ids = changed.iter().map(|row| row.row_id).collect();
    let lsns = changed.iter().map(|row| row.position.to_sql().0).collect();
    let ordinals = changed.iter().map(|row| row.position.to_sql().1).collect();
    (row_ids, lsns, ordinals)
}
