-- Accepted writes: an application server that writes for a client calls accept_write in the transaction of its
-- writes, so that the client's next pull never shows a state older than what it was told is accepted.

create schema if not exists tributary;

create table tributary.accepted_write (
    user_id text not null,
    client_id text not null,
    epoch bigint not null,
    constraint accepted_write_is_key primary key (user_id, client_id),
    constraint accepted_write_epoch_is_positive check (epoch > 0)
);
comment on table tributary.accepted_write is 'The newest accepted-write epoch of each client. Its row stays locked until commit, so a client''s epochs commit in order.';

-- Owner's rights, so that an application's role needs EXECUTE on the function alone; the search path is pinned for that.
create function tributary.accept_write(user_id text, client_id text) returns bigint
    language plpgsql
    security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    accepted bigint;
begin
    if accept_write.user_id is null or accept_write.user_id = '' then
        raise exception 'accept_write: user_id is empty' using errcode = 'invalid_parameter_value';
    end if;
    if accept_write.client_id is null or accept_write.client_id = '' or char_length(accept_write.client_id) > 255 then
        raise exception 'accept_write: client_id must have 1 to 255 characters' using errcode = 'invalid_parameter_value';
    end if;
    insert into tributary.accepted_write as a (user_id, client_id, epoch)
    values (accept_write.user_id, accept_write.client_id, 1)
    on conflict on constraint accepted_write_is_key do update set epoch = a.epoch + 1
    returning a.epoch into accepted;
    perform pg_logical_emit_message(true, 'tributary.accept_write',
        json_build_object('user_id', accept_write.user_id, 'client_id', accept_write.client_id, 'epoch', accepted)::text);
    return accepted;
end
$$;
comment on function tributary.accept_write(text, text) is 'Raises the client''s accepted-write epoch, emits it into the stream, and returns it.';
revoke all on function tributary.accept_write(text, text) from public;
grant usage on schema tributary to public;
