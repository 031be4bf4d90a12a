"""Alerts: the rules are valid, and of all of them exactly the expected ones fire in each case of faults.yaml."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

DEPLOY = Path(__file__).resolve().parent.parent
SCRAPED = "15s"
# Rules are evaluated half as often as samples come, as it is this that takes the time.
EVALUATED = "30s"
EVERY = 'count by (alertname, severity) (ALERTS{alertstate="firing"})'
NAMESPACE = 'namespace="tributary",job="tributary/tributary"'


def named(series):
    """The series with the labels that every one of them has."""
    return series.replace("{", "{" + NAMESPACE + ",", 1)


def values(notation):
    """`0x9` is a hexadecimal number to promtool, and not ten zeros: constants are written out as steps of nothing."""
    return re.sub(r"(?<![\w.+-])([\d.]+)x(\d+)", r"\1+0x\2", notation)


def case_test(case, healthy):
    series = {**healthy, **case.get("series", {})}
    expected = [
        {"labels": f'{{alertname="{name}",severity="{severity}"}}', "value": 1}
        for name, severities in case.get("fires", {}).items()
        for severity in severities
    ]
    return {
        "name": case["name"],
        "interval": SCRAPED,
        "input_series": [{"series": named(name), "values": values(given)} for name, given in series.items()],
        "promql_expr_test": [{"expr": EVERY, "eval_time": at, "exp_samples": expected} for at in case["at"]],
    }


def main():
    rules = yaml.safe_load((DEPLOY / "monitoring/rules.yaml").read_text())["spec"]
    # As texts: `0x240` is a number to YAML as well.
    faults = yaml.load((DEPLOY / "monitoring/faults.yaml").read_text(), yaml.BaseLoader)
    alerts = [(rule["alert"], rule["labels"]["severity"]) for group in rules["groups"] for rule in group["rules"]]
    assert len(alerts) == len(set(alerts)), "an alert of one severity stands twice"
    fired = {(name, s) for case in faults["cases"] for name, all_ in case.get("fires", {}).items() for s in all_}
    if unproved := set(alerts) - fired:
        sys.exit(f"no case of faults.yaml raises {sorted(unproved)}")
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
        tests = {
            "rule_files": ["rules.yaml"],
            "evaluation_interval": EVALUATED,
            "tests": [case_test(case, faults["healthy"]) for case in faults["cases"]],
        }
        (folder / "tests.yaml").write_text(yaml.safe_dump(tests, sort_keys=False))
        for command in (["check", "rules", "rules.yaml"], ["test", "rules", "tests.yaml"]):
            done = subprocess.run(["promtool", *command], cwd=folder, capture_output=True, text=True)
            if done.returncode != 0:
                sys.exit(done.stdout + done.stderr)
    print(f"alerts: {len(alerts)} rules, {len(faults['cases'])} cases")


main()
