#!/bin/sh
# Measures this checkout and prints one Markdown table, with a baseline of the same run beside each figure.
# `tests/bench.sh --scale 0.05` is a quick run, `--only NAME` a single measurement; see `--help`.
set -eu
cd "$(dirname "$0")/.."
. deploy/prerequisites.sh

cargo build --release --workspace --bins
exec target/release/bench "$@"
