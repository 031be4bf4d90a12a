"""What kustomize and Helm make of the files, as lists of objects."""

import subprocess
import sys
from pathlib import Path

import yaml

DEPLOY = Path(__file__).resolve().parent.parent
OVERLAYS = ("dev", "production")
# Values files of the chart; the first two are the overlays' counterparts.
HELM = ("dev", "production", "gateway")
NAMESPACES = {"dev": "tributary-dev", "production": "tributary", "gateway": "tributary"}
CHART = DEPLOY / "helm/tributary"


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stderr}")
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def kustomize(overlay):
    return run("kubectl", "kustomize", DEPLOY / "k8s/overlays" / overlay)


def helm(values):
    return run(
        "helm", "template", "tributary", CHART, "--namespace", NAMESPACES[values],
        "--values", CHART / f"values-{values}.yaml", "--set-file", f"config={DEPLOY / 'sample/sync.yaml'}",
    )
