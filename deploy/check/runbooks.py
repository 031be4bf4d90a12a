"""Runbooks: each alert has one, each is reached from the index, and what they tell people to type exists."""

import re
import sys
from pathlib import Path

import yaml

DEPLOY = Path(__file__).resolve().parent.parent
ROOT = DEPLOY.parent
RUNBOOKS = DEPLOY / "runbooks"
# Subcommands that runbooks may name before the code has them; once it has, a name here is one too many.
AWAITED_COMMANDS = {"status", "reset", "doctor"}
# What it means, where to look, and what to do, which may stand in the table of what is seen.
PARTS = (r"^\*\*What it means\.\*\*", r"^\*\*Look", r"^\*\*Do|\| do \|$")
COMMAND = re.compile(r"^(?:`|    )(?:.*/)?materializer ([a-z]+)", re.MULTILINE)


def commands():
    """Subcommands of the materializer, from its settings."""
    source = (ROOT / "materializer/src/settings.rs").read_text()
    body = re.search(r"pub enum Command \{(.*?)\n\}", source, re.DOTALL).group(1)
    return {name.lower() for name in re.findall(r"^    (\w+)(?:\(|,)", body, re.MULTILINE)}


def settings():
    sources = [ROOT / "materializer/src/settings.rs", ROOT / "puller/src/settings.rs"]
    names = {name for path in sources for name in re.findall(r'env = "(TRIBUTARY_[A-Z_]+)"', path.read_text())}
    return names | {"TRIBUTARY_LOG"}


def relations():
    """Tables and functions of the migrations."""
    texts = "".join(path.read_text() for path in (ROOT / "migrations").rglob("*.sql"))
    names = set(re.findall(r"create (?:table|function) (tributary\.\w+)", texts))
    return names | {"tributary.state_migration", "tributary.source_migration"}


def links(text):
    return re.findall(r"\]\(([^)#\s]+)\)", text)


def problems():
    rules = yaml.safe_load((DEPLOY / "monitoring/rules.yaml").read_text())["spec"]["groups"]
    alerts = {}
    for rule in (rule for group in rules for rule in group["rules"]):
        alerts.setdefault(rule["alert"], set()).add(rule["annotations"]["runbook_url"].rsplit("/", 1)[1])
    index = (RUNBOOKS / "README.md").read_text()
    for alert, files in alerts.items():
        if len(files) != 1:
            yield f"{alert} has several runbooks: {sorted(files)}"
        for file in files:
            if f"| {alert} | [{file}]({file}) |" not in index:
                yield f"README.md: {alert} and {file} are not in one line of the index"
            text = (RUNBOOKS / file).read_text() if (RUNBOOKS / file).exists() else ""
            if not text.startswith(f"# {alert}\n"):
                yield f"{file}: its title is not {alert}"
            yield from (f"{file}: no part {part}" for part in PARTS if not re.search(part, text, re.MULTILINE))
    for alert in re.findall(r"^\| (Tributary\w+) \|", index, re.MULTILINE):
        if alert not in alerts:
            yield f"README.md: no alert {alert}"
    known_commands, known_settings, known_relations = commands() | AWAITED_COMMANDS, settings(), relations()
    for path in sorted(RUNBOOKS.glob("*.md")):
        text = path.read_text()
        if path.name != "README.md" and path.name not in links(index):
            yield f"README.md does not lead to {path.name}"
        for link in links(text):
            if not (RUNBOOKS / link).exists():
                yield f"{path.name}: no file {link}"
        typed = "\n".join(re.findall(r"`[^`\n]*`|^    .*$", text, re.MULTILINE))
        for command in COMMAND.findall(typed):
            if command not in known_commands:
                yield f"{path.name}: no command `materializer {command}`"
        for name in set(re.findall(r"TRIBUTARY_[A-Z_]+", text)) - known_settings:
            yield f"{path.name}: no setting {name}"
        for name in set(re.findall(r"\btributary\.[a-z_]+\b", text)) - known_relations:
            yield f"{path.name}: no relation {name}"
        for file in re.findall(r"\b((?:deploy|tests)/(?!tributary-)[\w./-]+\w)", text):
            if not (ROOT / file).exists():
                yield f"{path.name}: no file {file}"


def main():
    if found := list(problems()):
        sys.exit("\n".join(found))
    print(f"runbooks: {len(list(RUNBOOKS.glob('*.md')))} files")


main()
