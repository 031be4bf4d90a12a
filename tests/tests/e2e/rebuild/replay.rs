//! ADR 003, "Idempotent first, intermediate, and final replay" and "24-hour expiry".

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::ensure;
use rustix::process::Signal;
use tributary_tests::json::Json;
use tributary_tests::sandbox::{Options, eventually};

use super::{Boxes, Exchange, items, ok, post, record, refusal, replay, restart_required};

const DAY: i64 = 24 * 3600;

fn seed() -> String {
    format!("{} insert into labels select n::text, 'u_1', null from generate_series(1, 7) n;", items("u_1", 1, 30))
}

/// Writes, deletes and moves that touch every row of the box.
const DISTURB: &str = "
    update items set body = body || '!' where id % 3 = 0;
    delete from items where id % 3 = 1;
    update items set box = 'u_2' where id % 3 = 2;
    insert into items values (-5, 'u_1', 'new'), (1000, 'u_1', 'new');
    update labels set name = 'named';";

#[test]
fn s_04_replays_are_byte_for_byte_whatever_is_written_and_whoever_answers() -> anyhow::Result<()> {
    let mut boxes = Boxes::start_with(&seed(), Options { pullers: 2, ..Options::default() })?;
    let source = boxes.sandbox.source()?;
    let mut client = boxes.client("u_1", "replay")?;
    let exchanges = record(&mut client, "box:u_1", 10)?;
    ensure!(exchanges.len() == 4, "a first, two intermediate and a final page");
    let empty = record(&mut client, "everyone", 10)?;
    ensure!(empty.len() == 1, "an empty scope is one final page");
    source.run(DISTURB)?;
    boxes.materialized(&source)?;
    let state = boxes.sandbox.state()?;
    let before = super::dump(&state)?;
    let counts = "select count(*) || ' ' || (select count(*) from tributary.snapshot) from tributary.rebuild_session";
    let sessions = state.text(counts)?;
    let check = |client: &tributary_tests::client::Client| {
        replay(client, &exchanges)?;
        // An earlier page after a later one is as good.
        replay(client, &exchanges[..2])?;
        replay(client, &empty)
    };
    check(&client)?;
    client.http.redirect(boxes.url(1)?);
    check(&client)?;
    ensure!(super::dump(&state)? == before, "a replay moved something");
    ensure!(state.text(counts)? == sessions, "a replay made a session or a snapshot");
    drop(state);

    // Everything dies without a farewell.
    for puller in &mut boxes.sandbox.pullers {
        puller.process.kill();
    }
    boxes.stop_materializers();
    boxes.sandbox.postgres.process.signal(Signal::KILL);
    ensure!(boxes.sandbox.postgres.process.ended_within(Duration::from_secs(10)));
    // Its children notice a little later that the postmaster is gone, and hold the data directory until then.
    eventually(Duration::from_secs(30), || boxes.sandbox.postgres.restart())?;
    for service in boxes.sandbox.materializers.iter_mut().chain(&mut boxes.sandbox.pullers) {
        service.process.restart()?;
    }
    boxes.sandbox.wait_until_ready()?;
    check(&client)?;

    // What changed after the boundary arrives by pull.
    boxes.settle(&mut client, &boxes.sandbox.source()?, "u_1", 10)?;
    Ok(())
}

/// The first request, many times at once through two pullers: one session, and one and the same page.
#[test]
fn s_04_a_first_request_that_comes_many_times_at_once_is_one_session() -> anyhow::Result<()> {
    let boxes = Boxes::start_with(&seed(), Options { pullers: 2, ..Options::default() })?;
    let source = boxes.sandbox.source()?;
    let state = boxes.sandbox.state()?;
    let urls = [boxes.url(0)?, boxes.url(1)?];
    let client = boxes.client("u_1", "repeated")?;
    for round in 0..5 {
        // Content that nobody has staged.
        source.run(&format!("update items set body = 'round {round}' where box = 'u_1'"))?;
        boxes.materialized(&source)?;
        let request = client.rebuild_request(&client.start_rebuild("box:u_1", 10));
        let asking: Vec<_> = (0..16)
            .map(|number| {
                let mut one = boxes.fresh("u_1", "repeated")?;
                one.http.redirect(urls[number % 2]);
                let request = request.clone();
                Ok(std::thread::spawn(move || post(&one, &request)))
            })
            .collect::<anyhow::Result<_>>()?;
        let mut pages = Vec::new();
        for asked in asking {
            let page = asked.join().map_err(|_| anyhow::anyhow!("a request panicked"))??;
            ok(&page)?;
            pages.push(page.body);
        }
        ensure!(pages.iter().all(|page| *page == pages[0]), "round {round}: pages differ");
        ensure!(
            state.number("select count(*) from tributary.rebuild_session")? == round + 1,
            "round {round}: sessions"
        );
        ensure!(state.number("select count(*) from tributary.snapshot")? == round + 1, "round {round}: snapshots");
    }
    Ok(())
}

/// An attempt is named by its client for one scope: the same id elsewhere is another attempt.
#[test]
fn s_04_an_attempt_is_one_clients_and_of_one_scope() -> anyhow::Result<()> {
    let boxes = Boxes::start(&format!("{} update items set shared = true where id <= 12;", seed()))?;
    let state = boxes.sandbox.state()?;
    let (one, two) = (boxes.client("u_1", "one")?, boxes.client("u_1", "two")?);
    let named = one.start_rebuild("box:u_1", 10);
    let mut cursors = std::collections::BTreeSet::new();
    for (number, (client, scope)) in
        [(&one, "box:u_1"), (&one, "everyone"), (&two, "box:u_1"), (&two, "everyone")].into_iter().enumerate()
    {
        let mut rebuild = super::with_cursor(client, &named, None::<String>);
        scope.clone_into(&mut rebuild.scope);
        let page = ok(&post(client, &client.rebuild_request(&rebuild))?)?;
        ensure!(page.get("scope").and_then(Json::as_text) == Some(scope), "another scope's page");
        cursors.insert(page.get("cursor").and_then(Json::as_text).unwrap_or_default().to_owned());
        ensure!(state.number("select count(*) from tributary.rebuild_session")? == number as i64 + 1);
    }
    ensure!(cursors.len() == 4, "one continuation for two attempts");
    Ok(())
}

#[test]
fn s_04_a_session_ends_exactly_24_hours_after_its_creation() -> anyhow::Result<()> {
    let mut boxes = Boxes::start_with(&seed(), Options { pullers: 2, ..Options::default() })?;
    let source = boxes.sandbox.source()?;
    let mut client = boxes.client("u_1", "expiry")?;
    let exchanges = record(&mut client, "box:u_1", 10)?;
    source.run(DISTURB)?;
    boxes.materialized(&source)?;
    let created = boxes.sandbox.state()?.text(
        "select (extract(epoch from created_at) * 1000000)::bigint from tributary.rebuild_session where page_limit = 10",
    )?;
    let expires = created.parse::<i64>()? + DAY * 1_000_000;
    let micros = || Ok::<_, anyhow::Error>(i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_micros())?);
    // Puller 1 is a few seconds before the end; more of them where starting it takes longer.
    let mut replayed = 0;
    for seconds in [4, 20, 100] {
        let offset = (expires - micros()?) / 1_000_000 - seconds;
        boxes.shift_clock(1, offset)?;
        client.http.redirect(boxes.url(1)?);
        let shifted = || Ok::<_, anyhow::Error>(micros()? + offset * 1_000_000);
        // The first request would begin anew behind the end: a continuation finds it.
        loop {
            let Exchange { request, response } = &exchanges[1 + replayed % (exchanges.len() - 1)];
            let before = shifted()?;
            let again = client.http.post("/sync/rebuild", request.as_bytes())?;
            let after = shifted()?;
            if again.status == 200 {
                ensure!(again.body == response.body, "a replay differs");
                // Replays never extend the session.
                ensure!(before < expires, "a page was replayed {} µs after the end", before - expires);
                replayed += 1;
                continue;
            }
            ensure!(refusal(&again)? == restart_required());
            ensure!(after >= expires, "refused {} µs before the end", expires - after);
            break;
        }
        if replayed > exchanges.len() {
            break;
        }
    }
    ensure!(replayed > exchanges.len(), "no replay before the end");
    for Exchange { request, .. } in &exchanges[1..] {
        let again = client.http.post("/sync/rebuild", request.as_bytes())?;
        ensure!(refusal(&again)? == restart_required());
    }
    // A null cursor makes a new session with a new boundary, also under the old id.
    let fresh = client.http.post("/sync/rebuild", exchanges[0].request.as_bytes())?;
    ensure!(fresh.body != exchanges[0].response.body && ok(&fresh)?.get("has_more").is_some());
    // The same by the clock of a puller that is not shifted: its session is still there.
    client.http.redirect(boxes.url(0)?);
    let rebuild = client.start_rebuild("box:u_1", 1000);
    let page = ok(&post(&client, &client.rebuild_request(&rebuild))?)?;
    ensure!(page.get("has_more").and_then(Json::as_bool) == Some(false));
    ensure!(page.get("records").and_then(Json::as_list).is_some_and(|records| records.len() == 19));
    Ok(())
}
