//! `materializer apply --dry-run`: what a changed configuration would ask for is told, and nothing is changed.

use std::fs;

use anyhow::{Context as _, ensure};
use tributary_tests::sandbox::{Options, Sandbox};

/// Everything that a change of the configuration could leave behind.
fn traces(sandbox: &Sandbox) -> anyhow::Result<Vec<String>> {
    let (state, source) = (sandbox.state()?, sandbox.source()?);
    Ok(vec![
        state.text("select configuration_no || ' ' || stream_generation from tributary.progress")?,
        state.text("select count(*)::text from tributary.configuration")?,
        state.text("select count(*)::text from tributary.manifest")?,
        state.text("select coalesce(max(membership_generation), 0)::text from tributary.scope")?,
        state.text(
            "select string_agg(relname, ',' order by relname) from pg_class
            where relnamespace = 'tributary_data'::regnamespace and relkind = 'r'",
        )?,
        source.text("select string_agg(tablename, ',' order by tablename) from pg_publication_tables")?,
        source.text("select count(*)::text from pg_replication_slots")?,
    ])
}

#[test]
fn a_dry_run_tells_what_differs_and_changes_nothing() -> anyhow::Result<()> {
    let sandbox = Sandbox::start(Options::default())?;
    let source = sandbox.source()?;
    let before = traces(&sandbox)?;
    let file = sandbox.dir().join("changed.yaml");
    let path = file.to_string_lossy().into_owned();
    let text = fs::read_to_string(sandbox.config())?;

    // The file in force.
    fs::write(&file, &text)?;
    let (exit, output) = sandbox.materializer_command(&["apply", "--dry-run", "--config", &path])?;
    ensure!(exit.success() && output.contains("nothing differs from the configuration in force"), "{output}");

    // A new table with a rule of its own.
    source.run("create table notes (id int primary key, owner_id text, body text)")?;
    let added = text
        .replacen("tables:\n", "tables:\n  - relation: public.notes\n", 1)
        .replacen("scopes:\n", "scopes:\n  - scope: 'notes:{owner_id}'\n    rows: SELECT * FROM notes\n", 1)
        .replacen("assignments:\n", "assignments:\n  - scope: 'notes:{user_id}'\n", 1);
    fs::write(&file, &added)?;
    let (exit, output) = sandbox.materializer_command(&["apply", "--dry-run", "--config", &path])?;
    ensure!(exit.success(), "{output}");
    for line in [
        "table public.notes is added, and copied from the source",
        "a rule of notes:{owner_id} is new",
        "scopes notes:{owner_id} get a new membership generation",
        "assignments differ",
        "a new manifest of class 2",
    ] {
        ensure!(output.contains(line), "no {line}: {output}");
    }
    let (exit, output) = sandbox.materializer_command(&["apply", "--dry-run", "--json", "--config", &path])?;
    // Warnings of the standard error follow.
    let mut values = serde_json::Deserializer::from_str(&output).into_iter::<serde_json::Value>();
    let json = values.next().context("nothing is printed")??;
    ensure!(exit.success() && json["schema"]["class"] == "class_2", "{output}");
    ensure!(json["tables"][0]["action"] == "added" && json["assignments"] == true, "{output}");

    // What cannot be resolved is refused with its line; without the flag there is nothing that this version does.
    fs::write(&file, added.replace("public.notes", "public.nowhere"))?;
    let (exit, output) = sandbox.materializer_command(&["apply", "--dry-run", "--config", &path])?;
    ensure!(!exit.success() && output.contains("relation public.nowhere does not exist"), "{output}");
    let (exit, output) = sandbox.materializer_command(&["apply", "--config", &path])?;
    ensure!(!exit.success() && output.contains("--dry-run"), "{output}");

    ensure!(traces(&sandbox)? == before, "a dry run left traces: {before:?} became {:?}", traces(&sandbox)?);
    Ok(())
}
