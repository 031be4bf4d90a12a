#!/bin/sh
# Runs every test, after installing what is missing. Arguments go to the test runner.
set -eu
cd "$(dirname "$0")/.."
. deploy/prerequisites.sh

cargo build --workspace --bins
if ! cargo nextest --version >/dev/null 2>&1; then
    echo "installing cargo-nextest"
    cargo install cargo-nextest --locked || echo "cargo-nextest cannot be installed; using cargo test"
fi
# Everything once with one database, and the end-to-end tests again with the state in a database of its own, except
# those that have no puller or nothing but load.
if cargo nextest --version >/dev/null 2>&1; then
    cargo nextest run --workspace "$@"
    TRIBUTARY_TEST_SPLIT=1 exec cargo nextest run --workspace \
        -E 'binary(e2e) and not test(/^(bad_input|lifetime|pgbench|rules_sql)::/)' "$@"
fi
cargo test --workspace --bins --lib --tests "$@"
TRIBUTARY_TEST_SPLIT=1 exec cargo test --package tributary-tests --test e2e "$@"
