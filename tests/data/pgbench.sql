-- What `pgbench -i -s 5` makes, for a sandbox that is started by hand.
create table pgbench_branches (bid integer primary key, bbalance integer, filler character(88));
create table pgbench_tellers (tid integer primary key, bid integer, tbalance integer, filler character(84));
create table pgbench_accounts (aid integer primary key, bid integer, abalance integer, filler character(84));
create table pgbench_history (tid integer, bid integer, aid integer, delta integer, mtime timestamp, filler character(22));
insert into pgbench_branches (bid, bbalance) select n, 0 from generate_series(1, 5) n;
insert into pgbench_tellers (tid, bid, tbalance) select n, (n - 1) / 10 + 1, 0 from generate_series(1, 50) n;
insert into pgbench_accounts (aid, bid, abalance, filler) select n, (n - 1) / 100000 + 1, 0, '' from generate_series(1, 500000) n;
