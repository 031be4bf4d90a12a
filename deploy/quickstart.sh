#!/bin/sh
# Installs what is missing, builds, and runs the sandbox on the sample application until Ctrl-C.
# Arguments go to `sandbox up`.
set -eu
cd "$(dirname "$0")/.."
. deploy/prerequisites.sh

cargo build --release --workspace --bins
exec "${CARGO_TARGET_DIR:-target}/release/sandbox" up "$@"
