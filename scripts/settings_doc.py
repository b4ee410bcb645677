"""Writes docs/settings.md from the settings classes and from the options of ``hotspare up``.

    .venv/bin/python scripts/settings_doc.py

A unit test fails when the page is not what this would write.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from app.cli.meanings import Process, Setting, settings_of, sim_settings  # noqa: E402
from app.cli.plan import PER_PROCESS, UpOptions  # noqa: E402
from app.cli.up_options import up_parser  # noqa: E402

PAGE = ROOT / "docs" / "settings.md"
HEAD = """\
# Settings

<!-- Written by scripts/settings_doc.py from the settings classes; a unit test fails when it is stale. -->

Every setting is an environment variable, and most are a flag of their process, too; flags win, and `hotspare COMMAND
--help` explains them. A bad value refuses to start, with a sentence and exit code 2. `hotspare` refuses variables that
begin with `HOTSPARE_` and are not on this page; variables of another process are ignored. Durations are seconds and
sizes bytes unless the name says otherwise. Switches are `true` or `false` as variables and `--name` or `--no-name` as
flags. Where a setting has several variables, the first one that is set wins.

`hotspare up` passes its whole environment on to the processes that it starts, so the tables below its own hold there,
too. It sets these for each process on its own, and from the outside they are ignored:
{per_process}.

`HOTSPARE_API_KEY` is the key that `status`, `up` and `bench` show to the gateway; without it, the first of
`HOTSPARE_API_KEYS` or of the file that `HOTSPARE_API_KEYS_FILE` names, if they are set for the command, too.

`HOTSPARE_MODEL_CACHE` names the folder where the embedded model is kept once it has been converted for vLLM.
"""
TITLES = {
    Process.GATEWAY: "`hotspare gateway`",
    Process.POD: "`hotspare pod`",
    Process.ENGINE: "`hotspare engine`",
    Process.GMS: "`hotspare gms`",
}


def page() -> str:
    """The whole page."""
    parts = [HEAD.format(per_process=wrapped(sorted(PER_PROCESS))), section("`hotspare up`", up_settings())]
    for process, title in TITLES.items():
        parts.append(section(title, settings_of(process).values()))
        if process is Process.ENGINE:
            parts.append(section("The sim engine", sim_settings().values()))
    return "\n".join(parts)


def up_settings() -> list[Setting]:
    """The options of ``up``, from its parser."""
    return [
        Setting(
            variables=(f"HOTSPARE_{action.dest.upper()}",),
            flag=" / ".join(action.option_strings),
            default=default_of(action.dest),
            meaning=(action.help or "").partition(" (default: ")[0],
        )
        for action in up_parser()._actions
        if action.dest != "help"
    ]


def default_of(option: str) -> str:
    value = getattr(UpOptions(), option)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)


def section(title: str, settings: Iterable[Setting]) -> str:
    rows = ["| variable | flag | default | meaning |", "| --- | --- | --- | --- |", *map(row, settings)]
    return "\n".join([f"## {title}", "", *rows, ""])


def row(setting: Setting) -> str:
    variables = ", ".join(f"`{name}`" for name in setting.variables)
    flag = ", ".join(f"`{name}`" for name in setting.flag.split(" / ") if name)
    default = f"`{setting.default}`" if setting.default else ""
    meaning = setting.meaning.replace("``", "`").replace("|", "\\|")
    return f"| {variables} | {flag} | {default} | {meaning} |"


def wrapped(names: list[str]) -> str:
    """The names in lines of at most 120 characters."""
    lines = [""]
    for at, name in enumerate(names):
        word = f"`{name}`" + ("," if at < len(names) - 1 else "")
        if len(lines[-1]) + len(word) > 118:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
