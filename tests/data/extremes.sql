-- Values at the ends of their types, and tables that hang together.
create table extremes (
    id bigint primary key,
    owner_id integer not null,
    f4 real, f8 double precision, num numeric, dt date, ts timestamp, tstz timestamptz, jb jsonb, j json,
    i8 bigint, long_num numeric, bounded numeric(20, 5), body text,
    remainder bigint generated always as (id % 1000) stored
);

-- The whole old row in each change.
create table whole (id integer primary key, owner_id integer, v text);
alter table whole replica identity full;

-- The key's own index, named.
create table named (id integer not null, owner_id integer, v text, constraint named_key primary key (id));
alter table named replica identity using index named_key;

create table parent (id integer primary key, owner_id integer, v text);
create table child (id integer primary key, parent_id integer references parent, owner_id integer);

create table parted (id integer primary key, owner_id integer, v text) partition by range (id);
create table parted_first partition of parted for values from (0) to (100);
