//! ADR 003, "Durable immutable staged rebuild snapshot" and "Rebuild response rules": content, order and cuts of pages.

use std::fmt::Write as _;

use anyhow::{Context as _, ensure};
use tributary_tests::json::Json;

use super::{Boxes, items, ok, post, record, replay};

fn records(body: &Json) -> anyhow::Result<&[Json]> {
    body.get("records").and_then(Json::as_list).context("records")
}

/// Page sizes against row counts around multiples of them.
#[test]
fn s_04_every_page_but_the_last_is_full() -> anyhow::Result<()> {
    let counts = [0, 1, 2, 3, 4, 6, 998, 999, 1000, 1001, 1999, 2000, 2001];
    let mut seed = String::new();
    for (number, count) in counts.iter().enumerate() {
        seed += &items(&format!("n_{count}"), 10_000 * number as i64, *count);
        // A second table in the same scope, where one row of it makes the count.
        if *count > 2 {
            write!(
                seed,
                "delete from items where id = {}; insert into labels values ('l{count}', 'n_{count}', null);",
                10_000 * number
            )?;
        }
    }
    let boxes = Boxes::start(&seed)?;
    for count in counts {
        let user = format!("n_{count}");
        let scope = format!("box:{user}");
        let mut client = boxes.client(&user, &user)?;
        for limit in [1, 2, 3, 999, 1000] {
            if count > 100 && limit < 100 {
                continue;
            }
            let mut rebuild = client.start_rebuild(&scope, limit);
            let mut pages = Vec::new();
            while !rebuild.finished {
                pages.push(records(&client.rebuild_page(&mut rebuild)?)?.len() as i64);
            }
            ensure!(client.rows[&scope].len() as i64 == count, "{count} rows, limit {limit}: {pages:?}");
            // An exact multiple ends with its last full page: the final page can contain records.
            let expected = (count + limit - 1) / limit;
            ensure!(pages.len() as i64 == expected.max(1), "{count} rows, limit {limit}: {pages:?}");
            ensure!(pages[..pages.len() - 1].iter().all(|records| *records == limit), "{count}, {limit}: {pages:?}");
        }
        client.sync(1000)?;
    }
    Ok(())
}

/// Rows larger than a block, blocks full of records, and pages across all of them: the client verifies order, row
/// digests and the scope's digest.
#[test]
fn s_04_pages_cross_blocks() -> anyhow::Result<()> {
    let seed = "
        insert into items select n, 'u_1', case
            when n % 700 = 0 then (select string_agg(md5((n * 20000 + k)::text), '') from generate_series(1, 10000) k)
            when n % 700 in (1, 2) then repeat('é\\u2028\"', 60000)
            else n::text end
        from generate_series(1, 2800) n;
        insert into labels select n::text, 'u_1', repeat('x', n % 500) from generate_series(1, 1500) n;";
    let boxes = Boxes::start(seed)?;
    let source = boxes.sandbox.source()?;
    let state = boxes.sandbox.state()?;
    let mut client = boxes.client("u_1", "blocks")?;
    for limit in [1000, 999, 317] {
        let exchanges = record(&mut client, "box:u_1", limit)?;
        super::compare(&client, &source, "u_1")?;
        replay(&client, &exchanges)?;
    }
    let blocks = state.texts(
        "select cardinality(record_ends), octet_length(records), first_row from tributary.snapshot_block
         join tributary.snapshot s using (snapshot_no) where row_count > 1000 order by block_no",
    )?;
    let numbers =
        |column: usize| blocks.iter().map(move |row| row[column].as_deref().unwrap_or_default().parse::<i64>());
    ensure!(blocks.len() > 10, "too few blocks: {blocks:?}");
    ensure!(numbers(1).any(|octets| octets.is_ok_and(|octets| octets > 256 * 1024)), "no block holds a large row");
    ensure!(numbers(0).sum::<Result<i64, _>>()? == 4300);
    // One snapshot serves all page sizes.
    ensure!(state.number("select count(*) from tributary.snapshot where row_count > 1000")? == 1);
    // Small pages around every block boundary.
    let mut rebuild = client.start_rebuild("box:u_1", 1);
    for _ in 0..710 {
        client.rebuild_page(&mut rebuild)?;
    }
    Ok(())
}

#[test]
fn s_04_what_is_written_while_a_client_pages_comes_by_pull() -> anyhow::Result<()> {
    let seed = format!("{} {}", items("u_1", 1, 60), items("u_2", 101, 20));
    let boxes = Boxes::start(&seed)?;
    let source = boxes.sandbox.source()?;
    let mut client = boxes.client("u_1", "paging")?;
    // A rebuild that nothing disturbs, for comparison.
    let mut still = boxes.client("u_1", "still")?;
    let undisturbed: Vec<_> = record(&mut still, "box:u_1", 7)?
        .iter()
        .map(|exchange| Ok(records(&ok(&exchange.response)?)?.to_vec()))
        .collect::<anyhow::Result<_>>()?;
    let checksum = |body: &Json| body.get("checksum").cloned();
    let still_final = record(&mut still, "box:u_1", 7)?.last().map(|last| ok(&last.response)).transpose()?;
    let mut rebuild = client.start_rebuild("box:u_1", 7);
    let mut page = 0;
    while !rebuild.finished {
        let body = client.rebuild_page(&mut rebuild)?;
        ensure!(records(&body)? == undisturbed[page].as_slice(), "page {page} changed");
        if rebuild.finished {
            ensure!(checksum(&body) == still_final.as_ref().and_then(checksum), "the digest changed");
        }
        page += 1;
        let n = page as i64;
        source.run(&format!(
            "update items set body = 'changed {n}' where id % 7 = {n} % 7;
             delete from items where id = {n} * 5;
             update items set box = case box when 'u_1' then 'u_2' else 'u_1' end where id in ({n}, 61 - {n}, 100 + {n});
             update items set id = 1000 + id where id = 30 + {n};
             insert into items values (-{n}, 'u_1', 'before all'), (500 + {n}, 'u_1', 'after all');
             insert into labels values ('{n}', 'u_1', 'another table')"
        ))?;
        boxes.materialized(&source)?;
    }
    ensure!(page == undisturbed.len());
    boxes.settle(&mut client, &source, "u_1", 7)?;
    let mut fresh = boxes.client("u_1", "fresh")?;
    boxes.settle(&mut fresh, &source, "u_1", 1000)?;
    ensure!(fresh.rows == client.rows, "pulled and rebuilt rows differ");
    Ok(())
}

#[test]
fn s_04_an_empty_scope_is_one_final_page() -> anyhow::Result<()> {
    let boxes = Boxes::start("")?;
    let source = boxes.sandbox.source()?;
    let mut client = boxes.client("u_1", "empty")?;
    for limit in [1, 1000] {
        let exchanges = record(&mut client, "box:u_1", limit)?;
        ensure!(exchanges.len() == 1);
        replay(&client, &exchanges)?;
    }
    // Emptied again after it held something: another content, as empty.
    source.run(&items("u_1", 1, 3))?;
    boxes.settle(&mut client, &source, "u_1", 10)?;
    source.run("delete from items")?;
    boxes.materialized(&source)?;
    let mut other = boxes.client("u_1", "emptied")?;
    ensure!(record(&mut other, "box:u_1", 1)?.len() == 1);
    // Its final cursor goes on from there.
    other.rebuild("everyone", 1)?;
    source.run(&items("u_1", 1, 3))?;
    boxes.settle(&mut other, &source, "u_1", 10)?;
    let request = other.rebuild_request(&other.start_rebuild("box:u_1", 10));
    ensure!(records(&ok(&post(&other, &request)?)?)?.len() == 3);
    Ok(())
}
