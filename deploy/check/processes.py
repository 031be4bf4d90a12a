"""Processes: each container's command takes the environment that its manifest gives it. The programs are started with it and
a database that is not there: a setting that they do not take ends them otherwise than by saying that they cannot connect.

Needs built programs: those of TRIBUTARY_BINARIES, or of target/. Without any it says so and checks nothing.
"""

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from rendered import DEPLOY, HELM, OVERLAYS, helm, kustomize

ROOT = DEPLOY.parent
SECRETS = {
    "source-url": "postgresql://nobody:nothing@127.0.0.1:1/source",
    "state-url": "postgresql://nobody:nothing@127.0.0.1:1/state",
    "token-keys": "1:" + base64.urlsafe_b64encode(bytes(range(32))).decode().rstrip("="),
    "jwt-secret": "x" * 32,
}


def binaries():
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    named = os.environ.get("TRIBUTARY_BINARIES")
    for folder in [ROOT / named] if named else [target / "release", target / "debug"]:
        if all((folder / program).exists() for program in ("materializer", "puller")):
            return folder
    return None


def environment(container, without):
    """The container's variables, with ports that are free here."""
    given = {}
    for item in container.get("env", []):
        reference = item.get("valueFrom", {}).get("secretKeyRef")
        value = SECRETS[reference["key"]] if reference else item["value"]
        if not reference or reference["key"] not in without:
            given[item["name"]] = re.sub(r"^0\.0\.0\.0:\d+$", "127.0.0.1:0", value)
    return given


def start(folder, command, given):
    done = subprocess.run([str(folder / Path(command[0]).name), *command[1:]], env=given, capture_output=True, text=True, timeout=60)
    return done.returncode, next((line for line in done.stderr.splitlines() if line.startswith("error")), "")


def main():
    folder = binaries()
    if not folder:
        print("processes: nothing is built, so nothing was started")
        return
    rendered = [(name, document) for name in OVERLAYS for document in kustomize(name)]
    rendered += [(f"{name} (Helm)", document) for name in HELM for document in helm(name)]
    found, seen = [], set()
    for name, document in rendered:
        if document["kind"] not in ("Deployment", "Job"):
            continue
        for container in document["spec"]["template"]["spec"]["containers"]:
            # An identity header is given instead of the secret that is optional for it.
            without = {"jwt-secret"} if any(e["name"] == "TRIBUTARY_IDENTITY_HEADER" for e in container["env"]) else set()
            given = environment(container, without)
            key = json.dumps([container["command"], given])
            if key in seen:
                continue
            seen.add(key)
            code, error = start(folder, container["command"], given)
            if code != 1 or "cannot connect to the" not in error:
                found.append(f"{name}: {container['name']} ends with {code}: {error}")
    health = json.loads(re.search(r"^HEALTHCHECK .* CMD (\[.*\])$", (DEPLOY / "Containerfile").read_text(), re.MULTILINE).group(1))
    code, _ = start(folder, health, {"TRIBUTARY_ADMIN_LISTEN": "0.0.0.0:1"})
    # clap's own: the program does not know the command.
    more = ", and no health command yet" if code == 2 else ""
    if code not in (1, 2):
        found.append(f"Containerfile: {' '.join(health)} ends with {code} where nothing listens")
    if found:
        sys.exit("\n".join(found))
    print(f"processes: {len(seen)} environments are taken{more}")


main()
