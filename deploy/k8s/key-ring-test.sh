#!/bin/sh
# A rotation by key-ring.sh, step by step: whatever a puller with the ring before or after a step signs, one with the other
# ring verifies, so that no rollout makes a token forged.
set -eu
cd "$(dirname "$0")"

fail() {
    echo "key ring: $*" >&2
    exit 1
}
keys() { printf '%s' "$1" | tr ',' '\n'; }
signer() { keys "$1" | head -n 1; }
verifies() { keys "$1" | grep -qxF "$2"; }

before=$(./key-ring.sh new)
oldest=$(signer "$before")
for step in add promote retire add promote add promote retire retire; do
    after=$(printf '%s' "$before" | ./key-ring.sh "$step")
    [ "$before" != "$after" ] || fail "$step changes nothing"
    verifies "$after" "$(signer "$before")" || fail "$step: a new puller refuses what an old one signs"
    verifies "$before" "$(signer "$after")" || fail "$step: an old puller refuses what a new one signs"
    [ -z "$(keys "$after" | cut -d: -f1 | sort | uniq -d)" ] || fail "$step: two keys have one id"
    keys "$after" | grep -vqE '^[1-9][0-9]*:[A-Za-z0-9_-]{43}$' && fail "$step: a key is not 32 octets"
    before=$after
done
verifies "$before" "$oldest" && fail "the oldest key is never retired"
for wrong in '' '1' '1:short' "0:$(head -c 43 /dev/zero | tr '\0' a)" "$before,"; do
    if message=$(printf '%s' "$wrong" | ./key-ring.sh add 2>&1); then fail "takes a ring that is none"; fi
    case "$message" in *short*) fail "repeats the secret" ;; esac
done
if ./key-ring.sh new | ./key-ring.sh retire 2>/dev/null; then fail "retires the only key"; fi
echo "key ring: a rotation whose neighbours understand each other"
