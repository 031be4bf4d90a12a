#!/bin/sh
# The steps of a key rotation. Reads a key ring (TRIBUTARY_TOKEN_KEYS) from standard input, and writes the next one.
#
#   key-ring.sh new            a ring of one new key; reads nothing
#   key-ring.sh add            a new key stands last: every puller can verify it, none signs with it yet
#   key-ring.sh promote        the last key stands first: it signs, the others still verify
#   key-ring.sh retire         the last key is gone: tokens that it signed are refused
#
# Between two steps every puller must have been restarted with the ring (deploy/runbooks/key-rotation.md): then any two
# pullers verify each other's tokens at every moment, while a rollout is under way too.
set -eu

key() {
    head -c 32 /dev/urandom | basenc --base64url | tr -d '='
}

read_ring() {
    ring=$(cat)
    printf '%s\n' "$ring" | grep -qE '^[1-9][0-9]*:[A-Za-z0-9_-]{43,}=*(,[1-9][0-9]*:[A-Za-z0-9_-]{43,}=*)*$' || {
        # The text is not repeated: it is the secret.
        echo "standard input holds no key ring (id:base64url[,id:base64url...], 32 octets or more each)" >&2
        exit 1
    }
    first=${ring%%,*}
    last=${ring##*,}
    others=${ring%,*}
}

needs_two() {
    [ "$first" != "$last" ] || { echo "the ring has one key: add one first" >&2; exit 1; }
}

case "${1:-}" in
    new) printf '1:%s' "$(key)" ;;
    add)
        read_ring
        newest=$(printf '%s' "$ring" | tr ',' '\n' | cut -d: -f1 | sort -n | tail -n 1)
        printf '%s,%d:%s' "$ring" $((newest + 1)) "$(key)"
        ;;
    promote) read_ring && needs_two && printf '%s,%s' "$last" "$others" ;;
    retire) read_ring && needs_two && printf '%s' "$others" ;;
    *) sed -n '2,8p' "$0" >&2; exit 2 ;;
esac
