-- Durable, commit-ordered sync state. Written by one leading materializer; read by pullers, each request in
-- one repeatable-read snapshot.
--
-- Stream positions are stored as (commit_lsn, ordinal), ordered as a pair of signed 64-bit integers:
--   generation_start      (0, 0)                            also the position of every row of a baseline
--   effect                (lsn, event << 24 | effect)       event ordinal from 0, effect ordinal below 2^24
--   transaction_end       (lsn, 9223372036854775807)
-- `shared/src/position.rs` is the only home of this encoding.

create schema if not exists tributary;
create schema if not exists tributary_data;

create table tributary.leader (
    epoch bigint not null,
    holder uuid not null,
    renewed_at timestamptz not null,
    acknowledged_lsn bigint not null,
    singleton boolean not null default true,
    constraint leader_epoch_is_key primary key (epoch),
    constraint leader_is_one_row unique (singleton),
    constraint leader_singleton_is_true check (singleton)
);
comment on table tributary.leader is 'The lease of the one leading materializer.';
comment on column tributary.leader.epoch is 'Raised by every takeover. State transactions hold it FOR KEY SHARE until commit, so that a former leader cannot write (fencing).';
comment on column tributary.leader.holder is 'The leading process; its sessions carry it in application_name, so that the next leader can end them.';
comment on column tributary.leader.renewed_at is 'Heartbeat, by the state database''s clock. Past the lease a standby takes over.';
comment on column tributary.leader.acknowledged_lsn is 'Exclusive: the highest LSN reported to the source''s slot as durable, recorded before it is reported.';

create table tributary.manifest (
    schema_version bigint not null,
    schema_hash bytea not null,
    document text not null,
    created_at timestamptz not null default clock_timestamp(),
    constraint manifest_version_is_key primary key (schema_version),
    constraint manifest_hash_is_unique unique (schema_hash),
    constraint manifest_hash_is_sha256 check (octet_length(schema_hash) = 32),
    constraint manifest_version_is_positive check (schema_version > 0)
);
comment on table tributary.manifest is 'Published schema manifests; never changed.';
comment on column tributary.manifest.document is 'The manifest as it is sent on the wire, schema_hash included.';

create table tributary.configuration (
    configuration_no bigint not null generated always as identity,
    schema_version bigint not null,
    registry text not null,
    created_at timestamptz not null default clock_timestamp(),
    constraint configuration_no_is_key primary key (configuration_no),
    constraint configuration_has_manifest foreign key (schema_version) references tributary.manifest (schema_version)
);
comment on table tributary.configuration is 'Resolved registries (what is synchronized), immutable; progress points to the one in force.';
comment on column tributary.configuration.registry is 'JSON of shared::registry::Registry.';

create table tributary.progress (
    singleton boolean not null default true,
    stream_generation uuid not null,
    boundary_lsn bigint not null,
    resume_lsn bigint not null,
    commit_time timestamptz not null,
    materialized_at timestamptz not null,
    leader_epoch bigint not null,
    configuration_no bigint not null,
    next_row_id bigint not null,
    constraint progress_is_one_row primary key (singleton),
    constraint progress_singleton_is_true check (singleton),
    constraint progress_has_configuration foreign key (configuration_no) references tributary.configuration (configuration_no),
    constraint progress_lsns_are_ordered check (boundary_lsn >= 0 and resume_lsn >= boundary_lsn)
);
comment on table tributary.progress is 'The durable boundary. One row once a baseline is active; every state transaction updates it.';
comment on column tributary.progress.boundary_lsn is 'Inclusive: commit LSN of the last materialized source transaction; 0 is the generation start.';
comment on column tributary.progress.resume_lsn is 'Exclusive: every source transaction that ends at or before it is materialized; streaming resumes here.';
comment on column tributary.progress.commit_time is 'Source commit time of the boundary''s transaction; at a generation start the time of the baseline''s snapshot.';
comment on column tributary.progress.next_row_id is 'The next interned row number.';

create table tributary.scope (
    scope_no integer not null generated always as identity,
    scope_id text not null,
    membership_generation bigint not null default 1,
    retention_generation bigint not null default 1,
    floor_lsn bigint not null default 0,
    floor_ordinal bigint not null default 0,
    compacted_lsn bigint not null default 0,
    compacted_ordinal bigint not null default 0,
    constraint scope_no_is_key primary key (scope_no),
    constraint scope_id_is_unique unique (scope_id),
    constraint scope_id_is_bounded check (char_length(scope_id) between 1 and 255)
);
comment on table tributary.scope is 'Interned scopes. A scope is made on its first effect or its first assignment.';
comment on column tributary.scope.compacted_lsn is 'Greatest position (with compacted_ordinal), inclusive, of a delete marker that compaction removed. With the newest entry it gives the content position, which so never moves back.';
comment on column tributary.scope.floor_lsn is 'Resume floor (with floor_ordinal), inclusive: a cursor at or above it is valid, one below is stale.';

-- Seals (`shared/src/seal.rs`, their one home) let a reader recognise what was not written by us: 8 octets of SHA-256
-- over every column that matters. These functions are for statements that write in sets.
create function tributary.entry_seal(row_id bigint, commit_lsn bigint, ordinal bigint, scope_no integer, table_no smallint, present boolean)
    returns bytea language sql immutable parallel safe
    return pg_catalog.substr(pg_catalog.sha256('\x01'::bytea || pg_catalog.int8send(row_id) || pg_catalog.int8send(commit_lsn)
        || pg_catalog.int8send(ordinal) || pg_catalog.int4send(scope_no) || pg_catalog.int2send(table_no) || pg_catalog.boolsend(present)), 1, 8);
create function tributary.departed_seal(row_id bigint, table_no smallint, key bytea)
    returns bytea language sql immutable parallel safe
    return pg_catalog.substr(pg_catalog.sha256('\x02'::bytea || pg_catalog.int8send(row_id) || pg_catalog.int2send(table_no) || key), 1, 8);

create table tributary.scope_entry (
    row_id bigint not null,
    commit_lsn bigint not null,
    ordinal bigint not null,
    scope_no integer not null,
    table_no smallint not null,
    present boolean not null,
    seal bytea not null,
    constraint scope_entry_row_is_key primary key (row_id, scope_no)
);
create index scope_entry_position on tributary.scope_entry (scope_no, commit_lsn, ordinal);
create index scope_entry_marker on tributary.scope_entry (scope_no, commit_lsn, ordinal) where not present;
comment on table tributary.scope_entry is 'The latest effect of each row in each scope: membership edge (present), delivery candidate and scope content in one. present = false is a delete marker, kept until compaction.';

create table tributary.departed_row (
    row_id bigint not null,
    table_no smallint not null,
    key bytea not null,
    seal bytea not null,
    constraint departed_row_id_is_key primary key (row_id)
);
create unique index departed_row_key on tributary.departed_row (table_no, key);
comment on table tributary.departed_row is 'Keys of deleted rows that delete markers still name. A row that returns gets its number back, so that its new effect supersedes the marker.';
comment on column tributary.departed_row.key is 'Canonical typed_value octets of the primary key.';

create table tributary.scope_digest (
    scope_no integer not null,
    stream_generation uuid not null,
    schema_version bigint not null,
    membership_generation bigint not null,
    commit_lsn bigint not null,
    ordinal bigint not null,
    row_count bigint not null,
    digest bytea not null,
    seal bytea not null,
    constraint scope_digest_scope_is_key primary key (scope_no),
    constraint scope_digest_has_scope foreign key (scope_no) references tributary.scope (scope_no) on delete cascade,
    constraint scope_digest_is_sha256 check (octet_length(digest) = 32)
);
comment on table tributary.scope_digest is 'Cache: the digest of a scope whose newest effect is at exactly this position, under this stream, schema and membership.';

create table tributary.client (
    client_no bigint not null generated always as identity,
    user_id text not null,
    client_id text not null,
    generation bigint not null default 1,
    scope_set_version bigint not null default 0,
    created_at timestamptz not null,
    acknowledged_at timestamptz not null,
    generation_expired boolean not null default false,
    retired boolean not null default false,
    constraint client_no_is_key primary key (client_no),
    constraint client_id_is_unique unique (client_id),
    constraint client_generation_is_positive check (generation > 0)
);
create index client_acknowledged on tributary.client (acknowledged_at) where not generation_expired and not retired;
comment on table tributary.client is 'Registered clients. A client id belongs to one user.';
comment on column tributary.client.acknowledged_at is 'When a presented cursor last acknowledged; the creation time until then. Kept to the minute, so that idle polling does not write.';

create table tributary.client_scope (
    client_no bigint not null,
    scope_no integer not null,
    assigned boolean not null,
    acknowledged_lsn bigint,
    acknowledged_ordinal bigint,
    constraint client_scope_is_key primary key (client_no, scope_no),
    constraint client_scope_has_client foreign key (client_no) references tributary.client (client_no) on delete cascade,
    constraint client_scope_has_scope foreign key (scope_no) references tributary.scope (scope_no),
    constraint client_scope_checkpoint_is_whole check ((acknowledged_lsn is null) = (acknowledged_ordinal is null))
);
create index client_scope_scope on tributary.client_scope (scope_no);
comment on table tributary.client_scope is 'Scopes ever assigned to a client''s current generation, with the checkpoint: the greatest position that the client presented.';
comment on column tributary.client_scope.assigned is 'False: assigned earlier to this generation and removed since.';

create table tributary.materialized_epoch (
    user_id text not null,
    client_id text not null,
    epoch bigint not null,
    constraint materialized_epoch_is_key primary key (user_id, client_id)
);
comment on table tributary.materialized_epoch is 'The newest accepted-write epoch of a client that is materialized; written by the state transaction of its source transaction.';

create table tributary.snapshot (
    snapshot_no bigint not null generated always as identity,
    scope_no integer not null,
    stream_generation uuid not null,
    schema_version bigint not null,
    membership_generation bigint not null,
    content_lsn bigint not null,
    content_ordinal bigint not null,
    row_count bigint not null,
    byte_count bigint not null,
    digest bytea not null,
    seal bytea not null,
    created_at timestamptz not null,
    constraint snapshot_no_is_key primary key (snapshot_no),
    constraint snapshot_content_is_unique unique (scope_no, stream_generation, schema_version, membership_generation, content_lsn, content_ordinal),
    constraint snapshot_has_scope foreign key (scope_no) references tributary.scope (scope_no),
    constraint snapshot_digest_is_sha256 check (octet_length(digest) = 32)
);
comment on table tributary.snapshot is 'Immutable staged content of one scope at one content position (its newest effect; (0, 0) when it has none but a baseline''s).';

create table tributary.snapshot_block (
    snapshot_no bigint not null,
    block_no integer not null,
    first_row bigint not null,
    record_ends integer[] not null,
    records bytea not null,
    seal bytea not null,
    constraint snapshot_block_is_key primary key (snapshot_no, block_no),
    constraint snapshot_block_has_snapshot foreign key (snapshot_no) references tributary.snapshot (snapshot_no) on delete cascade
);
-- A page takes slices of blocks as they are: compressing them costs more than it saves.
alter table tributary.snapshot_block alter column records set storage external;
create index snapshot_block_first_row on tributary.snapshot_block (snapshot_no, first_row);
comment on table tributary.snapshot_block is 'Ready-made JSON records of a snapshot in row-identity order.';
comment on column tributary.snapshot_block.first_row is 'Ordinal, from 0, of the block''s first record in the snapshot.';
comment on column tributary.snapshot_block.record_ends is 'Exclusive end octet of each record in records; records follow each other without separators.';

create table tributary.rebuild_session (
    session_id uuid not null,
    client_no bigint not null,
    client_generation bigint not null,
    scope_no integer not null,
    rebuild_id uuid not null,
    stream_generation uuid not null,
    schema_version bigint not null,
    membership_generation bigint not null,
    retention_generation bigint not null,
    accepted_write_epoch bigint not null,
    boundary_lsn bigint not null,
    page_limit integer not null,
    key_id bigint not null,
    snapshot_no bigint not null,
    created_at timestamptz not null,
    expires_at timestamptz not null,
    constraint rebuild_session_id_is_key primary key (session_id),
    constraint rebuild_session_has_client foreign key (client_no) references tributary.client (client_no) on delete cascade,
    constraint rebuild_session_has_scope foreign key (scope_no) references tributary.scope (scope_no),
    constraint rebuild_session_has_snapshot foreign key (snapshot_no) references tributary.snapshot (snapshot_no),
    constraint rebuild_session_page_is_bounded check (page_limit between 1 and 1000),
    constraint rebuild_session_lasts_a_day check (expires_at = created_at + interval '24 hours')
);
create unique index rebuild_session_attempt on tributary.rebuild_session
    (client_no, client_generation, scope_no, rebuild_id, stream_generation, schema_version, membership_generation, retention_generation, accepted_write_epoch);
create index rebuild_session_snapshot on tributary.rebuild_session (snapshot_no);
create index rebuild_session_scope on tributary.rebuild_session (scope_no);
create index rebuild_session_expiry on tributary.rebuild_session (expires_at);
comment on column tributary.rebuild_session.boundary_lsn is 'Inclusive commit LSN of the snapshot boundary; 0 is the generation start.';

create table tributary.quarantine (
    quarantine_no bigint not null generated always as identity,
    commit_lsn bigint not null,
    reason text not null,
    relation text,
    detail text not null,
    created_at timestamptz not null default clock_timestamp(),
    resolved_at timestamptz,
    constraint quarantine_no_is_key primary key (quarantine_no)
);
comment on table tributary.quarantine is 'Transactions at which the stream stopped. Never holds row values, keys or scope ids.';
comment on column tributary.quarantine.commit_lsn is 'Inclusive: the commit LSN of the transaction that could not be materialized.';
