#!/bin/sh
# The steps of deploy/Containerfile. Without a container engine they do the same to folders.
#
#   build.sh compile BINARIES          builds both programs into the folder BINARIES
#   build.sh stage BINARIES ROOTFS     makes ROOTFS of them: the programs, the libraries that they load, and what the C
#                                      library and TLS read from /etc
#
# The image is made of files that are named here, so it holds no shell and nothing that could be left over.
set -eu

PROGRAMS="materializer puller"

compile() {
    binaries=$1
    profile=${PROFILE:-release}
    # Symbols stay for backtraces, line tables go: they are most of the size.
    CARGO_INCREMENTAL=0 CARGO_PROFILE_RELEASE_STRIP=debuginfo \
        cargo build --locked --profile "$profile" --package materializer --package puller
    folder=$profile
    [ "$folder" != dev ] || folder=debug
    mkdir -p "$binaries"
    for program in $PROGRAMS; do cp "${CARGO_TARGET_DIR:-target}/$folder/$program" "$binaries/"; done
}

# Libraries of a program, the loader among them, as absolute paths; nothing for a static program.
libraries() {
    ldd "$1" 2>/dev/null | sed -n -e 's/^.*=> \(\/[^ ]*\) (0x.*$/\1/p' -e 's/^[[:space:]]*\(\/[^ ]*\) (0x.*$/\1/p'
}

stage() {
    binaries=$1
    rootfs=$2
    [ ! -e "$rootfs" ] || { echo "$rootfs exists" >&2; exit 1; }
    mkdir -p "$rootfs"
    for program in $PROGRAMS; do
        install -D -m 0755 "$binaries/$program" "$rootfs/usr/local/bin/$program"
        if ldd "$binaries/$program" 2>/dev/null | grep -q 'not found'; then
            ldd "$binaries/$program" >&2
            exit 1
        fi
        for library in $(libraries "$binaries/$program"); do
            # `install` follows links: the name that is loaded is a file of its own.
            install -D -m 0755 "$library" "$rootfs$library"
        done
    done
    # Since 2.34 glibc resolves names by files and DNS without loading more libraries.
    if [ -e "$rootfs/lib64" ] && command -v getconf >/dev/null; then
        glibc=$(getconf GNU_LIBC_VERSION)
        minor=${glibc##*.}
        [ "$minor" -ge 34 ] || { echo "$glibc is too old to resolve names in an image of its own" >&2; exit 1; }
    fi
    mkdir -p "$rootfs/etc/ssl/certs"
    printf 'hosts: files dns\n' >"$rootfs/etc/nsswitch.conf"
    printf 'root:x:0:0:root:/:/nonexistent\nnonroot:x:65532:65532:nonroot:/nonexistent:/nonexistent\n' >"$rootfs/etc/passwd"
    printf 'root:x:0:\nnonroot:x:65532:\n' >"$rootfs/etc/group"
    # For TLS with public authorities; a database's own authority is mounted and named in its address.
    cp -L /etc/ssl/certs/ca-certificates.crt "$rootfs/etc/ssl/certs/ca-certificates.crt"
    install -D -m 0644 "$(dirname "$0")/../../LICENSE" "$rootfs/usr/share/doc/tributary/LICENSE"
    [ ! -e /usr/share/doc/libc6/copyright ] || install -D -m 0644 /usr/share/doc/libc6/copyright "$rootfs/usr/share/doc/libc6/copyright"
    chmod 0644 "$rootfs"/etc/nsswitch.conf "$rootfs"/etc/passwd "$rootfs"/etc/group "$rootfs"/etc/ssl/certs/ca-certificates.crt
    find "$rootfs" -type d -exec chmod 0755 {} +
    find "$rootfs" -exec touch -h -d "@${SOURCE_DATE_EPOCH:-0}" {} +
}

case "${1:-}" in
    compile) [ $# -eq 2 ] && compile "$2" ;;
    stage) [ $# -eq 3 ] && stage "$2" "$3" ;;
    *) sed -n '2,8p' "$0" >&2; exit 2 ;;
esac
