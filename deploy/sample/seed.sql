-- A few thousand rows, the same each time.

insert into users (id, name, email, created_at)
select 'u_' || n, 'User ' || n, 'user' || n || '@example.org', timestamptz '2026-01-01 00:00:00Z' + n * interval '1 hour'
from generate_series(1, 20) n;

insert into projects (id, name, owner_id, budget, settings, updated_at)
select n, 'Project ' || n, 'u_' || (n % 20 + 1), n * 100.25,
    jsonb_build_object('color', (array['red', 'green', 'blue'])[n % 3 + 1], 'weight', n * 0.5, 'tags', jsonb_build_array('p' || n)),
    timestamptz '2026-01-02 00:00:00Z' + n * interval '1 minute'
from generate_series(1, 40) n;

insert into members (id, project_id, user_id, role)
select row_number() over (order by p, k), p, 'u_' || ((p * 7 + k * 3) % 20 + 1), case when k = 0 then 'owner' else 'member' end
from generate_series(1, 40) p, generate_series(0, 4) k;

insert into tasks (id, project_id, assignee_id, title, priority, estimate_hours, progress, due, remind_at, archived, updated_at)
select n, n % 40 + 1, case when n % 11 <> 0 then 'u_' || (n % 20 + 1) end, 'Task ' || n || ' – ' || md5(n::text), n % 5,
    case when n % 3 <> 0 then (n % 80) / 4.0 end, (n % 100) / 100.0::double precision,
    case when n % 4 <> 0 then date '2026-02-01' + n % 365 end, case when n % 6 = 0 then time '08:00' + n % 600 * interval '1 minute' end,
    n % 9 = 0, timestamptz '2026-01-03 00:00:00Z' + n * interval '7 seconds 123 microseconds'
from generate_series(1, 2000) n;

insert into comments (id, task_id, author_id, body, created_at)
select n, n % 2000 + 1, 'u_' || (n * 13 % 20 + 1), 'Comment ' || n || E'\nwith a second line, "quotes" and ünïcode ✓',
    timestamptz '2026-01-04 00:00:00Z' + n * interval '3 seconds'
from generate_series(1, 1500) n;

insert into documents (id, owner_id, title, body, thumbnail, metadata, updated_at)
select md5('document ' || n)::uuid, 'u_' || (n % 20 + 1), 'Document ' || n, repeat('Lorem ipsum ' || n || '. ', n % 400),
    case when n % 5 = 0 then decode(md5(n::text), 'hex') end,
    case when n % 4 <> 0 then jsonb_build_object('pages', n % 30, 'ratio', n / 8.0, 'draft', n % 2 = 0, 'note', null) end,
    timestamptz '2026-01-05 00:00:00Z' + n * interval '11 seconds'
from generate_series(1, 400) n;

insert into templates (id, name, content, published)
select 't_' || n, 'Template ' || n, jsonb_build_object('steps', jsonb_build_array('plan', 'do', n)), n % 3 <> 0
from generate_series(1, 60) n;

-- New rows get numbers after these.
select setval(pg_get_serial_sequence('projects', 'id'), 40), setval(pg_get_serial_sequence('members', 'id'), 200),
    setval(pg_get_serial_sequence('tasks', 'id'), 2000), setval(pg_get_serial_sequence('comments', 'id'), 1500);
