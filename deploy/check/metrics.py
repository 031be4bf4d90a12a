"""Metrics: what alerts, dashboard, autoscaling and runbooks name is recorded by the code, and the README's table names
exactly what is recorded. Queries of the dashboard are valid."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

DEPLOY = Path(__file__).resolve().parent.parent
ROOT = DEPLOY.parent
NAME = re.compile(r"\btributary_[a-z0-9_]+\b")
RECORDED = re.compile(r'(?:counter|gauge|histogram)!\(\s*"(tributary_[a-z0-9_]+)"')
# What Prometheus makes of a histogram.
SUFFIXES = ("_bucket", "_sum", "_count")


def recorded():
    """The names in the macros that record, of both processes."""
    names = set()
    for folder in ("shared/src", "materializer/src", "puller/src"):
        for source in (ROOT / folder).rglob("*.rs"):
            names |= set(RECORDED.findall(source.read_text()))
    return names


def documented():
    """The names in the README's table, which stand in its first column."""
    rows = re.findall(r"^\| (`tributary_[^|]*)\|", (ROOT / "README.md").read_text(), re.MULTILINE)
    return {name for row in rows for name in NAME.findall(row)}


def awaited():
    lines = (DEPLOY / "monitoring/awaited-metrics.txt").read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def plain(name, known):
    for suffix in SUFFIXES:
        if name.endswith(suffix) and name.removesuffix(suffix) in known:
            return name.removesuffix(suffix)
    return name


def dashboard_queries():
    board = json.loads((DEPLOY / "monitoring/dashboard.json").read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)), "two panels have one id"
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    queries += [annotation["expr"] for annotation in board["annotations"]["list"] if "expr" in annotation]
    return queries


def used():
    """Where each name is used: in queries, and in what a person is told to look at."""
    texts = {f"dashboard: {query}": query for query in dashboard_queries()}
    rules = yaml.safe_load((DEPLOY / "monitoring/rules.yaml").read_text())
    for group in rules["spec"]["groups"]:
        for rule in group["rules"]:
            texts[f"alert {rule['alert']}"] = rule["expr"]
    variables = json.loads((DEPLOY / "monitoring/dashboard.json").read_text())["templating"]["list"]
    texts["dashboard's variables"] = json.dumps([variable.get("definition", "") for variable in variables])
    for path in [*(DEPLOY / "k8s").rglob("*.yaml"), *(DEPLOY / "helm").rglob("*.yaml"), DEPLOY / "monitoring/adapter-rules.yaml"]:
        if not path.is_symlink():
            texts[str(path.relative_to(ROOT))] = path.read_text()
    for path in (DEPLOY / "runbooks").glob("*.md"):
        # Roles and schemas of PostgreSQL begin alike, and are no metrics.
        prose = re.sub(r"\btributary_(data|replication|materializer|puller|puller_b|application|monitor)\b", "", path.read_text())
        texts[str(path.relative_to(ROOT))] = prose
    return {(name, place) for place, text in texts.items() for name in NAME.findall(text)}


def check_queries():
    rules = []
    for query in dashboard_queries():
        query = query.replace("$__rate_interval", "5m").replace("$namespace", ".*").replace("$job", ".*")
        rules.append({"record": f"tributary:query{len(rules)}", "expr": query})
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}, file)
        file.flush()
        done = subprocess.run(["promtool", "check", "rules", file.name], capture_output=True, text=True)
    return [] if done.returncode == 0 else [done.stdout + done.stderr]


def main():
    code, table, waiting = recorded(), documented(), awaited()
    known = code | waiting
    problems = check_queries()
    problems += [f"{name} is recorded, and README.md's table lacks it" for name in sorted(code - table)]
    problems += [f"README.md's table has {name}, which nothing records" for name in sorted(table - code)]
    problems += [f"{name} is recorded: take it out of awaited-metrics.txt" for name in sorted(code & waiting)]
    uses = {(plain(name, known), place) for name, place in used()}
    problems += [f"{place}: no metric {name}" for name, place in sorted(uses) if name not in known]
    problems += [f"{name} is awaited, and nothing uses it" for name in sorted(waiting - {name for name, _ in uses})]
    shown = {plain(name, known) for query in dashboard_queries() for name in NAME.findall(query)}
    problems += [f"the dashboard does not show {name}" for name in sorted(code - shown)]
    if problems:
        sys.exit("\n".join(problems))
    print(f"metrics: {len(code)} recorded, {len(waiting)} awaited, {len(dashboard_queries())} queries")


main()
