"""The chart and the kustomize overlays of the same name render the same objects.

What may differ, and is taken away before: Namespace (Helm makes it, without labels), labels and annotations that name the
tool, and how each rolls pods when the configuration changes (a suffix of the ConfigMap's name, a checksum)."""

import difflib
import re
import sys

import yaml

from rendered import OVERLAYS, helm, kustomize

TOOL_LABELS = {"helm.sh/chart", "app.kubernetes.io/managed-by", "app.kubernetes.io/version"}


def bare(node):
    """Without what belongs to a tool, at every depth."""
    if isinstance(node, list):
        return [bare(item) for item in node]
    if isinstance(node, str):
        return re.sub(r"^(tributary-config)-[a-z0-9]{10}$", r"\1", node)
    if not isinstance(node, dict):
        return node
    kept = {}
    for key, value in node.items():
        if key in ("labels", "annotations") and isinstance(value, dict):
            value = {k: v for k, v in value.items() if k not in TOOL_LABELS and not k.startswith(("helm.sh/hook", "checksum/"))}
            if not value:
                continue
        kept[key] = bare(value)
    return kept


def normal(documents):
    objects = {}
    for document in documents:
        if document["kind"] == "Namespace":
            continue
        document = bare(document)
        document["metadata"].pop("namespace", None)
        if document["kind"] == "ConfigMap":
            # A block's last line break is each tool's own affair.
            document["data"] = {name: text.rstrip("\n") for name, text in document["data"].items()}
        objects[f"{document['kind']} {document['metadata']['name']}"] = yaml.safe_dump(document)
    return objects


def differences(ours, theirs):
    for name in sorted(ours.keys() | theirs.keys()):
        yield from difflib.unified_diff(
            ours.get(name, "").splitlines(), theirs.get(name, "").splitlines(), f"kustomize: {name}", f"helm: {name}", "", "", 2, ""
        )


def main():
    count = 0
    found = []
    for name in OVERLAYS:
        ours, theirs = normal(kustomize(name)), normal(helm(name))
        count += len(ours)
        found += [f"{name}: {line}" for line in differences(ours, theirs)]
    if found:
        sys.exit("\n".join(found))
    print(f"comparison: {count} objects are the same from kustomize and Helm")


main()
