-- What roles.sql gives, of the objects that the migrations make. With psql, as the roles that own them, so with the
-- materializer's own two addresses:
--
--   psql -v ON_ERROR_STOP=1 -v state=1 -f grants.sql postgresql://tributary_materializer@HOST/STATE
--   psql -v ON_ERROR_STOP=1 -v source=1 -f grants.sql postgresql://tributary_replication@HOST/SOURCE
--
-- after the first `materializer migrate`, and after each upgrade.

set client_min_messages = warning;

\if :{?state}
-- Projections are made as the configuration asks for them.
alter default privileges in schema tributary_data grant select on tables to tributary_puller;
select format('grant select on %s to tributary_puller', oid::regclass)
from pg_class
where relnamespace = 'tributary_data'::regnamespace and relkind = 'r' and pg_has_role(relowner, 'usage')
\gexec

-- What is written is named by column where not every column is a puller's to write: it moves no boundary, floor or entry,
-- gives no client to another user, and brings no retired one back.
grant select on tributary.progress, tributary.leader, tributary.configuration, tributary.manifest, tributary.scope,
    tributary.scope_entry, tributary.departed_row, tributary.scope_digest, tributary.client, tributary.client_scope,
    tributary.materialized_epoch, tributary.snapshot, tributary.snapshot_block, tributary.rebuild_session
    to tributary_puller;
grant insert (scope_id), update (scope_id) on tributary.scope to tributary_puller;
grant insert, update on tributary.scope_digest to tributary_puller;
grant insert, update (generation, scope_set_version, created_at, acknowledged_at, generation_expired) on tributary.client
    to tributary_puller;
grant insert, update (assigned, acknowledged_lsn, acknowledged_ordinal), delete on tributary.client_scope to tributary_puller;
grant insert, update (row_count, byte_count, digest, seal) on tributary.snapshot to tributary_puller;
grant insert on tributary.snapshot_block to tributary_puller;
grant insert, delete on tributary.rebuild_session to tributary_puller;

grant select on tributary.progress, tributary.leader, tributary.configuration, tributary.quarantine to tributary_monitor;
\endif

\if :{?source}
grant select on tributary.accepted_write to tributary_puller;
grant execute on function tributary.accept_write(text, text) to tributary_application;
\endif
