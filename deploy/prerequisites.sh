# Sourced by the commands of the README: installs what is missing on Debian, and says what to install elsewhere.

has_postgresql() {
    command -v initdb >/dev/null 2>&1 || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1
}

install_missing() {
    missing=""
    has_postgresql || missing="$missing postgresql"
    command -v psql >/dev/null 2>&1 || missing="$missing postgresql-client"
    command -v cc >/dev/null 2>&1 || missing="$missing build-essential"
    command -v setpriv >/dev/null 2>&1 || missing="$missing util-linux"
    [ -n "$missing" ] || return 0
    if ! command -v apt-get >/dev/null 2>&1; then
        echo "please install:$missing" >&2
        exit 1
    fi
    as_root=""
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null 2>&1 || { echo "please install as root: apt-get install$missing" >&2; exit 1; }
        as_root="sudo"
    fi
    echo "installing$missing"
    $as_root apt-get update -q
    # Debian starts a cluster of its own on installation; ours do not need it, and it does not harm them.
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $missing
}

install_missing
if ! command -v cargo >/dev/null 2>&1; then
    echo "please install a Rust toolchain (1.90 or later), then run this again" >&2
    exit 1
fi
