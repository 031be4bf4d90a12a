-- Roles with only what each of them needs. With psql, as a superuser or the managed service's administrator:
--
--   psql -v ON_ERROR_STOP=1 -v source=1 -v tables='public.documents, public.templates' -v publish=tributary -f roles.sql SOURCE
--   psql -v ON_ERROR_STOP=1 -v state=1 -f roles.sql STATE
--
-- and with both of `source` and `state` where they are one database. Then give each role that logs in a password
-- (\password tributary_puller), run `materializer migrate`, and grants.sql. It may be run at any time, and is run again
-- when sync.yaml names more tables.
--
--   tributary_replication   logs in at the source for the materializer (TRIBUTARY_SOURCE_URL): reads `tables` and the WAL
--   tributary_materializer  logs in at the state for the materializer (TRIBUTARY_STATE_URL): owns the sync state
--   tributary_puller        logs in at both for the puller: reads the state, keeps clients, digests and snapshots
--   tributary_application   no login; granted to the roles of application servers that call tributary.accept_write
--   tributary_monitor       no login; granted to people: progress, leader, quarantine, never a row, scope or user
--
-- publish makes the publication of this name for `tables`, or brings it up to them: run by who owns them, or a superuser.
-- The materializer leaves a publication alone that is as it needs it.
--
-- Variables that are not always needed:
--
--   owner        instead of `publish`, the role that owns the tables: makes tributary_replication a member, so that the
--                materializer keeps the publication's list of tables itself. It can write the tables then. Not possible
--                where the owner is the very administrator who makes the roles (PostgreSQL 16).
--   replication  a role that exists and may replicate, instead of tributary_replication: where the administrator
--                may not give REPLICATION.

set client_min_messages = warning;
\if :{?replication}
\else
\set replication tributary_replication
\endif

select format('create role %I %s', role, options)
from (values
    (:'replication', 'login'),
    ('tributary_materializer', 'login'),
    ('tributary_puller', 'login'),
    ('tributary_application', 'nologin'),
    ('tributary_monitor', 'nologin')
) as wanted (role, options)
where not exists (select from pg_roles where rolname = role)
\gexec

-- Takeover ends the sessions of the former leader, also those with the source where it is on the same server.
select case :'replication'
    when 'tributary_replication' then 'grant tributary_replication to tributary_materializer'
    else 'grant pg_signal_backend to tributary_materializer'
end
\gexec

select format('grant connect, create, temporary on database %I to tributary_materializer', current_database()) where :{?state}
union all
select format('grant connect, create, temporary on database %I to %I', current_database(), :'replication') where :{?source}
union all
select format('grant connect on database %I to tributary_puller, tributary_monitor', current_database())
\gexec

-- The schemas are the administrator's, what is in them is its maker's: so two roles can share one database.
create schema if not exists tributary;
grant usage on schema tributary to tributary_puller;

\if :{?state}
create schema if not exists tributary_data;
grant usage, create on schema tributary, tributary_data to tributary_materializer;
grant usage on schema tributary_data to tributary_puller;
grant usage on schema tributary to tributary_monitor;
\endif

\if :{?source}
grant usage, create on schema tributary to :"replication";
grant usage on schema tributary to tributary_application;
-- A managed service has a role for it instead of the attribute.
select case
    when exists (select from pg_roles where rolname = 'rds_replication') then format('grant rds_replication to %I', :'replication')
    when not (select rolreplication from pg_roles where rolname = :'replication') then format('alter role %I replication', :'replication')
end
-- The slot, and who is connected.
union all select 'grant pg_read_all_stats to tributary_monitor'
\gexec
\if :{?owner}
grant :"owner" to :"replication";
\endif
\if :{?tables}
grant select on :tables to :"replication";
-- Reading a table takes its schema too.
select distinct format('grant usage on schema %I to %I', table_schema, grantee)
from information_schema.table_privileges
where grantee = :'replication' and table_schema not in ('tributary', 'tributary_data')
\gexec
\if :{?publish}
select format(
    case when exists (select from pg_publication where pubname = :'publish')
        then 'alter publication %1$I set table %2$s' else 'create publication %1$I for table %2$s' end,
    :'publish', 'only ' || regexp_replace(:'tables', '\s*,\s*', ', only ', 'g'))
union all select format(
    'alter publication %I set (publish = ''insert, update, delete, truncate'', publish_via_partition_root = true)', :'publish')
\gexec
\endif
\endif
\endif
