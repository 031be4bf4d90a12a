-- Roles with only what each of them needs. With psql, as a superuser or the managed service's administrator:
--
--   psql -v ON_ERROR_STOP=1 -v source=1 -v tables='public.documents, public.templates' -v owner=app -f roles.sql SOURCE
--   psql -v ON_ERROR_STOP=1 -v state=1 -f roles.sql STATE
--
-- and with both of `source` and `state` where they are one database. Then give each role that logs in a password
-- (\password tributary_puller), run `materializer migrate`, and run this again: it grants what the migrations made.
-- It may be run at any time, and is run again after every upgrade and when sync.yaml names more tables.
--
--   tributary_replication   logs in at the source for the materializer (TRIBUTARY_SOURCE_URL): reads `tables` and the WAL
--   tributary_materializer  logs in at the state for the materializer (TRIBUTARY_STATE_URL): owns the sync state
--   tributary_puller        logs in at both for the puller: reads the state, keeps clients, digests and snapshots
--   tributary_application   no login; granted to the roles of application servers that call tributary.accept_write
--   tributary_monitor       no login; granted to people: progress, leader, quarantine, never a row, scope or user
--
-- owner: the role that owns the tables. The materializer keeps the publication's list of tables itself, and PostgreSQL
-- asks for the tables' owner for that. Without `owner`, tributary_replication is not a member of it, and cannot
-- write the tables; the publication is then made and kept by hand.

set client_min_messages = warning;

select format('create role %I %s', role, options)
from (values
    ('tributary_replication', 'login'),
    ('tributary_materializer', 'login'),
    ('tributary_puller', 'login'),
    ('tributary_application', 'nologin'),
    ('tributary_monitor', 'nologin')
) as wanted (role, options)
where not exists (select from pg_roles where rolname = role)
\gexec

-- An administrator who is no superuser may act for the roles whose objects are granted below.
select format('grant %I to current_user', role)
from (values ('tributary_replication'), ('tributary_materializer')) as owners (role)
where not (select rolsuper from pg_roles where rolname = current_user)
    and not pg_has_role(current_user, role, 'member')
\gexec

-- Takeover ends the sessions of the former leader, also those with the source where it is on the same server.
grant tributary_replication to tributary_materializer;

\if :{?state}
select format('grant connect, create, temporary on database %I to tributary_materializer', current_database())
union all select format('grant connect on database %I to tributary_puller, tributary_monitor', current_database())
\gexec
create schema if not exists tributary authorization tributary_materializer;
create schema if not exists tributary_data authorization tributary_materializer;
grant usage on schema tributary to tributary_puller, tributary_monitor;
grant usage on schema tributary_data to tributary_puller;
-- Projections are made by the materializer as the configuration asks for them.
alter default privileges for role tributary_materializer in schema tributary_data
    grant select on tables to tributary_puller;
grant select on all tables in schema tributary_data to tributary_puller;

-- Everything that writes is named by column where not every column is a puller's to write: it moves no boundary, floor
-- or entry, gives no client to another user, and brings no retired one back.
select format('grant %s on tributary.%I to %I', privileges, relation, role)
from (values
    ('progress', 'select', 'tributary_puller'),
    ('leader', 'select', 'tributary_puller'),
    ('configuration', 'select', 'tributary_puller'),
    ('manifest', 'select', 'tributary_puller'),
    ('scope', 'select, insert (scope_id), update (scope_id)', 'tributary_puller'),
    ('scope_entry', 'select', 'tributary_puller'),
    ('departed_row', 'select', 'tributary_puller'),
    ('scope_digest', 'select, insert, update', 'tributary_puller'),
    ('client', 'select, insert, update (generation, scope_set_version, created_at, acknowledged_at, generation_expired)',
        'tributary_puller'),
    ('client_scope', 'select, insert, update (assigned, acknowledged_lsn, acknowledged_ordinal), delete', 'tributary_puller'),
    ('materialized_epoch', 'select', 'tributary_puller'),
    ('snapshot', 'select, insert, update (row_count, byte_count, digest, seal)', 'tributary_puller'),
    ('snapshot_block', 'select, insert', 'tributary_puller'),
    ('rebuild_session', 'select, insert, delete', 'tributary_puller'),
    ('progress', 'select', 'tributary_monitor'),
    ('leader', 'select', 'tributary_monitor'),
    ('configuration', 'select', 'tributary_monitor'),
    ('quarantine', 'select', 'tributary_monitor')
) as wanted (relation, privileges, role)
where to_regclass(format('tributary.%I', relation)) is not null
\gexec
\endif

\if :{?source}
select format('grant connect, create, temporary on database %I to tributary_replication', current_database())
union all select format('grant connect on database %I to tributary_puller, tributary_monitor', current_database())
-- A managed service has a role for it instead of the attribute.
union all select case
    when exists (select from pg_roles where rolname = 'rds_replication') then 'grant rds_replication to tributary_replication'
    when not (select rolreplication from pg_roles where rolname = 'tributary_replication')
        then 'alter role tributary_replication replication'
end
\gexec
create schema if not exists tributary authorization tributary_replication;
grant usage, create on schema tributary to tributary_replication;
grant usage on schema tributary to tributary_puller, tributary_application;
\if :{?tables}
grant select on :tables to tributary_replication;
-- Reading a table takes its schema too.
select distinct format('grant usage on schema %I to tributary_replication', table_schema)
from information_schema.table_privileges
where grantee = 'tributary_replication' and table_schema not in ('tributary', 'tributary_data')
\gexec
\endif
\if :{?owner}
grant :"owner" to tributary_replication;
\endif
select 'grant select on tributary.accepted_write to tributary_puller' where to_regclass('tributary.accepted_write') is not null
union all select 'grant execute on function tributary.accept_write(text, text) to tributary_application'
where to_regprocedure('tributary.accept_write(text, text)') is not null
-- The slot, and who is connected.
union all select 'grant pg_read_all_stats to tributary_monitor'
\gexec
\endif

\if :{?state}
select to_regclass('tributary.progress') is null as missing \gset
\else
select to_regclass('tributary.accepted_write') is null as missing \gset
\endif
\if :missing
\echo 'The schema is empty yet: run "materializer migrate", then this file again.'
\endif
