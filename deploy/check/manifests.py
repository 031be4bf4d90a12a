"""Manifests: what kustomize and Helm render is valid for the oldest and the newest Kubernetes that is supported, and keeps
the rules that no schema knows: restricted pods, settings that exist, graces that cover the drain, selectors that meet.

Custom resources (PodMonitor, PrometheusRule, HTTPRoute) are held against their projects' schemas by custom.mjs.
"""

import copy
import functools
import json
import os
import re
import subprocess
import sys

import kubernetes_validate

from rendered import CHART, DEPLOY, HELM, OVERLAYS, helm, kustomize

ROOT = DEPLOY.parent
# `preStop.sleep` needs 1.30.
VERSIONS = ("1.30", "1.37")
CUSTOM = {"PodMonitor", "PrometheusRule", "HTTPRoute"}
# puller/src/main.rs, FAREWELL.
FAREWELL = 1
# To start up to the signal handler, and to leave after the drain.
MARGIN = 5
SETTING = re.compile(r'env = "(TRIBUTARY_[A-Z_]+)"(?:[^)]*?default_value = "([^"]*)")?', re.DOTALL)


def settings(crate):
    return dict(SETTING.findall((ROOT / crate / "src/settings.rs").read_text()))


SETTINGS = {"materializer": settings("materializer"), "puller": settings("puller")}


def pods(document):
    if document["kind"] in ("Deployment", "Job"):
        yield document["spec"]["template"]


def environment(container):
    return {item["name"]: item.get("value") for item in container.get("env", [])}


@functools.cache
def schema_problems(text):
    found = []
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(json.loads(text), version, strict=True)
        except kubernetes_validate.ValidationError as error:
            path = ".".join(str(part) for part in error.path)
            found.append(f"Kubernetes {version}: {path}: {error.message}")
    return found


def check_schema(document):
    return [] if document["kind"] in CUSTOM else schema_problems(json.dumps(document))


def check_custom(documents):
    custom = [document for document in documents if document["kind"] in CUSTOM]
    models = f"{os.environ['TOOLS']}/node/node_modules/@kubernetes-models"
    command = ["node", DEPLOY / "check/custom.mjs", models]
    done = subprocess.run(command, input=json.dumps(custom), capture_output=True, text=True, check=True)
    for document, problem in zip(custom, json.loads(done.stdout)):
        if problem:
            yield f"{document['kind']} {document['metadata']['name']}: {problem}"


def check_restricted(pod, container):
    """The `restricted` Pod Security Standard, and a root filesystem that nobody writes to."""
    of_pod, own = pod["spec"].get("securityContext", {}), container.get("securityContext", {})
    wanted = {
        "runAsNonRoot": (own.get("runAsNonRoot", of_pod.get("runAsNonRoot")), True),
        "seccompProfile": (of_pod.get("seccompProfile", {}).get("type"), "RuntimeDefault"),
        "allowPrivilegeEscalation": (own.get("allowPrivilegeEscalation"), False),
        "readOnlyRootFilesystem": (own.get("readOnlyRootFilesystem"), True),
        "capabilities.drop": (own.get("capabilities", {}).get("drop"), ["ALL"]),
        "automountServiceAccountToken": (pod["spec"].get("automountServiceAccountToken"), False),
        "enableServiceLinks": (pod["spec"].get("enableServiceLinks"), False),
        "privileged, host namespaces": (
            [pod["spec"].get(name) for name in ("hostNetwork", "hostPID", "hostIPC")] + [own.get("privileged")],
            [None] * 4,
        ),
    }
    for name, (found, needed) in wanted.items():
        if found != needed:
            yield f"{container['name']}: {name} is {found}, not {needed}"


def check_process(pod, container):
    program = container["command"][0].rsplit("/", 1)[1]
    known = SETTINGS[program]
    given = environment(container)
    for name in given:
        if name not in known and name != "TRIBUTARY_LOG":
            yield f"{program} has no setting {name}"
    if re.search(r":latest$|^[^:@]+$", container["image"].rsplit("/", 1)[-1]):
        yield f"{program}: the image {container['image']} names no release"
    requests, limits = container["resources"]["requests"], container["resources"]["limits"]
    if not {"cpu", "memory"} <= set(requests) or "memory" not in limits:
        yield f"{program}: requests of cpu and memory and a limit of memory are needed"


def check_service_process(pod, container):
    """Of a process that runs on: ports, probes, and time to drain."""
    program = container["command"][0].rsplit("/", 1)[1]
    given = {**SETTINGS[program], **{name: value for name, value in environment(container).items() if value}}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for name, setting in (("http", "TRIBUTARY_LISTEN"), ("admin", "TRIBUTARY_ADMIN_LISTEN")):
        if name in ports and given[setting].rsplit(":", 1)[1] != str(ports[name]):
            yield f"{program}: port {name} is {ports[name]}, but {setting} is {given[setting]}"
        if name in ports and given[setting].startswith("127."):
            yield f"{program}: {setting} is not reached from outside of the pod"
    for probe, path in (("startupProbe", "/livez"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
        if container.get(probe, {}).get("httpGet") != {"path": path, "port": "admin"}:
            yield f"{program}: {probe} does not ask {path} of the admin port"
    sleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    needed = sleep + int(given["TRIBUTARY_GRACE_SECONDS"]) + FAREWELL + MARGIN
    if pod["spec"].get("terminationGracePeriodSeconds", 30) < needed:
        yield f"{program}: terminationGracePeriodSeconds is less than preStop and drain need ({needed})"
    if program == "puller" and sleep == 0:
        yield "puller: preStop gives load balancers no time to learn that the pod leaves"


def selects(selector, labels):
    matched = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    for term in selector.get("matchExpressions", []):
        matched = matched and term["operator"] == "In" and labels.get(term["key"]) in term["values"]
    return matched


def check_together(documents):
    """References between objects."""
    deployments = {d["metadata"]["name"]: d for d in documents if d["kind"] == "Deployment"}
    labels = {name: d["spec"]["template"]["metadata"]["labels"] for name, d in deployments.items()}
    labels |= {d["metadata"]["name"]: d["spec"]["template"]["metadata"]["labels"] for d in documents if d["kind"] == "Job"}
    accounts = {d["metadata"]["name"] for d in documents if d["kind"] == "ServiceAccount"}
    maps = {d["metadata"]["name"] for d in documents if d["kind"] == "ConfigMap"}
    services = {d["metadata"]["name"]: d for d in documents if d["kind"] == "Service"}
    policies = [d["spec"] for d in documents if d["kind"] == "NetworkPolicy"]
    budgets = [d["spec"] for d in documents if d["kind"] == "PodDisruptionBudget"]
    for name, deployment in deployments.items():
        spec = deployment["spec"]
        if not selects(spec["selector"], labels[name]):
            yield f"{name} does not select its own pods"
        if sum(selects(budget["selector"], labels[name]) for budget in budgets) != 1:
            yield f"{name} needs one PodDisruptionBudget"
        account = spec["template"]["spec"].get("serviceAccountName")
        if account not in accounts:
            yield f"{name}: no ServiceAccount {account}"
        for volume in spec["template"]["spec"].get("volumes", []):
            if "configMap" in volume and volume["configMap"]["name"] not in maps:
                yield f"{name}: no ConfigMap {volume['configMap']['name']}"
        for constraint in spec["template"]["spec"]["topologySpreadConstraints"]:
            if not selects(constraint["labelSelector"], labels[name]):
                yield f"{name} spreads other pods than its own"
        if spec["strategy"]["rollingUpdate"]["maxUnavailable"] != 0:
            yield f"{name}: a rollout takes pods away before new ones are ready"
    for name, found in labels.items():
        chosen = [policy for policy in policies if selects(policy["podSelector"], found)]
        if [policy["policyTypes"] for policy in chosen] != [["Ingress", "Egress"]]:
            yield f"{name} needs one NetworkPolicy of both directions"
    for document in documents:
        name = document["metadata"]["name"]
        if document["kind"] == "HorizontalPodAutoscaler":
            target = document["spec"]["scaleTargetRef"]["name"]
            if "replicas" in deployments[target]["spec"]:
                yield f"{name}: applying {target} again would undo what was scaled"
        if document["kind"] == "Service":
            pod = [n for n in deployments if selects({"matchLabels": document["spec"]["selector"]}, labels[n])]
            ports = {p["name"] for n in pod for c in deployments[n]["spec"]["template"]["spec"]["containers"] for p in c["ports"]}
            wanted = {port["targetPort"] for port in document["spec"]["ports"]}
            if len(pod) != 1 or not wanted <= ports:
                yield f"Service {name} reaches no pod's port"
            if "admin" in wanted:
                yield f"Service {name} shows the admin port"
        if document["kind"] == "Ingress":
            for rule in document["spec"]["rules"]:
                for path in rule["http"]["paths"]:
                    service = path["backend"]["service"]
                    if service["port"]["name"] not in {p["name"] for p in services[service["name"]]["spec"]["ports"]}:
                        yield f"Ingress {name} names no port of its Service"
        if document["kind"] == "HTTPRoute":
            for backend in (b for rule in document["spec"]["rules"] for b in rule["backendRefs"]):
                if backend["port"] not in {p["port"] for p in services[backend["name"]]["spec"]["ports"]}:
                    yield f"HTTPRoute {name} names no port of its Service"
        if document["kind"] == "PodMonitor":
            if not all(selects(document["spec"]["selector"], labels[n]) for n in deployments):
                yield f"PodMonitor {name} misses pods"


def problems(documents):
    keys = [(d["kind"], d["metadata"]["name"]) for d in documents]
    yield from (f"{key} stands twice" for key in set(keys) if keys.count(key) > 1)
    for document in documents:
        found = list(check_schema(document))
        for pod in pods(document):
            for container in pod["spec"]["containers"]:
                found += check_restricted(pod, container)
                found += check_process(pod, container)
                if document["kind"] == "Deployment":
                    found += check_service_process(pod, container)
        yield from (f"{document['kind']} {document['metadata']['name']}: {problem}" for problem in found)
    yield from check_custom(documents)
    yield from check_together(documents)


def broken(documents):
    """Rules broken one at a time: a check that lets these pass checks nothing."""

    def change(what, kind, name, edit):
        changed = copy.deepcopy(documents)
        (document,) = [d for d in changed if (d["kind"], d["metadata"]["name"]) == (kind, name)]
        edit(document)
        return what, changed

    def container(document):
        return document["spec"]["template"]["spec"]["containers"][0]

    puller = ("Deployment", "tributary-puller")
    yield change("an unknown field", *puller, lambda d: d["spec"].update(replica=2))
    yield change("a root filesystem that is written", *puller, lambda d: container(d)["securityContext"].pop("readOnlyRootFilesystem"))
    yield change("a setting that does not exist", *puller, lambda d: container(d)["env"].append({"name": "TRIBUTARY_POOLSIZE", "value": "1"}))
    yield change("a grace that is too short", *puller, lambda d: d["spec"]["template"]["spec"].update(terminationGracePeriodSeconds=30))
    yield change("an admin port elsewhere", *puller, lambda d: container(d)["ports"][1].update(containerPort=9465))
    yield change("a liveness that follows readiness", *puller, lambda d: container(d)["livenessProbe"]["httpGet"].update(path="/readyz"))
    yield change("an image without a release", *puller, lambda d: container(d).update(image="tributary:latest"))
    yield change("a budget of other pods", "PodDisruptionBudget", "tributary-puller", lambda d: d["spec"]["selector"]["matchLabels"].update({"app.kubernetes.io/component": "pull"}))
    yield change("a policy of one direction", "NetworkPolicy", "tributary-puller", lambda d: d["spec"].update(policyTypes=["Ingress"]))
    yield change("an admin port for clients", "Service", "tributary-puller", lambda d: d["spec"]["ports"][0].update(targetPort="admin"))
    yield change("a custom resource that its project refuses", "PodMonitor", "tributary", lambda d: d["spec"]["podMetricsEndpoints"][0].update(interval="a while"))
    yield change("replicas beside an autoscaler", *puller, lambda d: d["spec"].update(replicas=2))


def check_values():
    """The chart refuses values that it does not know, and a release without a configuration."""
    chart = ["helm", "template", "tributary", str(CHART)]
    configured = [*chart, "--set-file", f"config={DEPLOY / 'sample/sync.yaml'}"]
    for what, command in (
        ("a misspelt value", [*configured, "--set", "puller.poolsize=8"]),
        ("no configuration", chart),
        ("a setting of another name", [*configured, "--set-string", "puller.settings.POOL_SIZE=8"]),
    ):
        if subprocess.run(command, capture_output=True).returncode == 0:
            yield f"the chart takes {what}"


def main():
    if (DEPLOY / "k8s/base/sync.yaml").read_text() != (DEPLOY / "sample/sync.yaml").read_text():
        sys.exit("deploy/k8s/base/sync.yaml is a copy of deploy/sample/sync.yaml, and differs")
    rendered = {f"overlay {name}": kustomize(name) for name in OVERLAYS}
    rendered |= {f"chart with {name}": helm(name) for name in HELM}
    found = [f"{name}: {problem}" for name, documents in rendered.items() for problem in problems(documents)]
    found += [f"not found: {what}" for what, documents in broken(rendered["overlay production"]) if not list(problems(documents))]
    found += check_values()
    if found:
        sys.exit("\n".join(found))
    count = sum(len(documents) for documents in rendered.values())
    print(f"manifests: {len(rendered)} renderings, {count} objects, Kubernetes {' and '.join(VERSIONS)}")


main()
