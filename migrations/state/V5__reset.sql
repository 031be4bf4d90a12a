-- What a reset needs: which server the stream comes from, and that an operator asked for a new stream generation.

create table tributary.source_server (
    singleton boolean not null default true,
    system_identifier text not null,
    timeline bigint not null,
    history text not null,
    constraint source_server_is_one_row primary key (singleton),
    constraint source_server_singleton_is_true check (singleton)
);
comment on table tributary.source_server is 'The server that the stream generation in force comes from; written when its baseline is activated.';
comment on column tributary.source_server.system_identifier is 'Of the source''s cluster, as pg_control_system() gives it: a restored dump is another cluster.';
comment on column tributary.source_server.timeline is 'The source''s timeline when it was last looked at. Another one is followed only if the two part after everything that is materialized.';
comment on column tributary.source_server.history is 'That timeline''s history file, empty for the first: two timelines of one number can have parted at different points.';

create table tributary.reset (
    reset_no bigint not null generated always as identity,
    requested_at timestamptz not null default clock_timestamp(),
    stream_generation uuid,
    completed_at timestamptz,
    constraint reset_no_is_key primary key (reset_no),
    constraint reset_completed_with_a_generation check ((completed_at is null) = (stream_generation is null))
);
create unique index reset_open on tributary.reset ((completed_at is null)) where completed_at is null;
comment on table tributary.reset is 'Requests for a new stream generation (materializer reset); the leader carries out the open one.';
comment on column tributary.reset.stream_generation is 'The generation that the reset activated.';
