#!/bin/sh
# Stages the image's files without a container engine, and looks at them: the programs run there as the image's user, two
# stagings are the same to the octet, and nothing else is in it.
#
# TRIBUTARY_BINARIES names a folder with built programs. Without it those of target/ are taken, and where nothing is built
# yet, a program of the system stands in for both. PROFILE=release (or dev) compiles them first, as the image does.
set -eu
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
    echo "image: $*" >&2
    exit 1
}

if [ -n "${PROFILE:-}" ]; then
    deploy/image/build.sh compile "$work/binaries"
    binaries=$work/binaries
else
    binaries=${TRIBUTARY_BINARIES:-}
    for folder in "${CARGO_TARGET_DIR:-target}/release" "${CARGO_TARGET_DIR:-target}/debug"; do
        [ -n "$binaries" ] || [ ! -x "$folder/materializer" ] || [ ! -x "$folder/puller" ] || binaries=$folder
    done
fi
which=$binaries
if [ -z "$binaries" ]; then
    mkdir "$work/stand-in"
    for program in materializer puller; do cp "$(command -v stat)" "$work/stand-in/$program"; done
    binaries=$work/stand-in
    which="a stand-in"
fi

deploy/image/build.sh stage "$binaries" "$work/one"
sleep 0.1
deploy/image/build.sh stage "$binaries" "$work/two"
octets() {
    tar --sort=name --owner=0 --group=0 --numeric-owner -C "$1" -cf - . | sha256sum
}
[ "$(octets "$work/one")" = "$(octets "$work/two")" ] || fail "two stagings differ"

others=$(cd "$work/one" && find . -type f | grep -vE '^\./(usr/local/bin/(materializer|puller)|lib(64)?/.*\.so(\.[0-9]+)*|usr/lib(64)?/.*\.so(\.[0-9]+)*|etc/(nsswitch\.conf|passwd|group|ssl/certs/ca-certificates\.crt)|usr/share/doc/(tributary/LICENSE|libc6/copyright))$' || true)
[ -z "$others" ] || fail "more is in it: $others"
loose=$(find "$work/one" \( -perm /6000 -o -perm /0022 \) -print)
[ -z "$loose" ] || fail "writable by others than root, or set-uid: $loose"

# As the image's user, with nothing but what was staged.
user=$(sed -n 's/^USER //p' deploy/Containerfile)
if [ "$(id -u)" -eq 0 ]; then
    chmod 0755 "$work"
    for program in materializer puller; do
        chroot --userspec="$user" "$work/one" "/usr/local/bin/$program" --version >/dev/null || fail "$program does not run"
    done
    ran="run as $user"
else
    ran="were not run, as that takes root"
fi

# What the Containerfile says, held against what it must agree with.
for member in $(sed -n 's/^members = \[\(.*\)\]$/\1/p' Cargo.toml | tr -d '",'); do
    grep -q "^COPY $member $member\$" deploy/Containerfile || fail "the Containerfile lacks the workspace's member $member"
done
needed=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
pinned=$(sed -n 's/^ARG RUST_IMAGE=rust:\([0-9]*\.[0-9]*\.[0-9]*\)-.*$/\1/p' deploy/Containerfile)
[ -n "$pinned" ] || fail "the Containerfile pins no toolchain"
[ "$(printf '%s\n%s\n' "$needed" "$pinned" | sort -V | head -n 1)" = "$needed" ] || fail "Rust $pinned is older than $needed"
version=$(sed -n '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"$/\1/p' Cargo.toml)
for file in deploy/Containerfile deploy/helm/tributary/Chart.yaml; do
    grep -q "ersion[=:] *\"\{0,1\}$version\"\{0,1\}\$" "$file" || fail "$file names another version than $version"
done
for file in deploy/k8s/base/*.yaml deploy/helm/tributary/templates/_pod.tpl; do
    ! grep 'runAsUser' "$file" | grep -qv "runAsUser: ${user%:*}\$" || fail "$file runs as another user than $user"
done
echo "image: $(du -sk --apparent-size "$work/one" | cut -f1) KiB of $which; the programs $ran"
