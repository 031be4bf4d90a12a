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
if cargo nextest --version >/dev/null 2>&1; then
    exec cargo nextest run --workspace "$@"
fi
exec cargo test --workspace --bins --lib --tests "$@"
