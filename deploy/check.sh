#!/bin/sh
# Checks everything in this folder without a cluster, a container engine or a Rust build. Installs what is missing.
# `deploy/check.sh NAME…` runs only the named checks.
set -eu
cd "$(dirname "$0")"
. check/tools.sh

# Each prints one line when all is well, and every problem otherwise.
containerfile() {
    hadolint --config image/hadolint.yaml Containerfile
    image/test.sh
}
scripts() {
    shellcheck -x check.sh check/tools.sh image/*.sh k8s/*.sh
    k8s/key-ring-test.sh
}
manifests() { python check/manifests.py; }
processes() { python check/processes.py; }
comparison() { python check/comparison.py; }
alerts() { python check/alerts.py; }
metrics() { python check/metrics.py; }
runbooks() { python check/runbooks.py; }
roles() { python check/roles.py; }

passed=0
failed=0
[ $# -gt 0 ] || set -- containerfile scripts manifests comparison processes alerts metrics runbooks roles
for check in "$@"; do
    # In a process of its own, as `set -e` means nothing inside a condition.
    code=0
    (set -e; "$check") & wait $! || code=$?
    if [ "$code" -eq 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAILED: $check" >&2; fi
done
echo "deploy: $passed passed, $failed failed"
[ "$failed" -eq 0 ]
