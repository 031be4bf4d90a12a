-- Rows of every kind of content that a stream and a baseline must agree on.
create type mood as enum ('sad', 'it''s ok');
create domain positive as numeric(12, 3) check (value > 0);
create type pair as (a integer, b text);

create table kinds (
    id bigint primary key,
    s text, vc varchar(10), c char(5), u uuid, m mood, d positive, p pair, ip inet, iv interval, ttz timetz,
    arr integer[], rng int4range, i2 smallint, i4 integer, i8 bigint, o oid, num numeric, num2 numeric(20, 5),
    f4 real, f8 double precision, b boolean, ts timestamp, tstz timestamptz, dt date, tm time,
    j json, jb jsonb, by bytea, mny money, x xml, reg regclass
);

create table "Mixed Case" (
    "Key:1" text primary key,
    "select" text,
    "größe" integer
);

create table wide (
    id text primary key,
    owner_id integer not null,
    note text,
    body text not null
);

create table parted (id integer primary key, owner_id integer, v text) partition by range (id);
create table parted_low partition of parted for values from (0) to (100);
create table parted_high partition of parted for values from (100) to (1000);

create table whole (id integer primary key, owner_id integer, v text);
alter table whole replica identity full;
