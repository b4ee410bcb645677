"""Writes docs/settings.md from the settings classes and from the options of ``hotspare up``, and for the Helm chart the
names that its ``extraEnv`` may set.

    .venv/bin/python scripts/settings_doc.py

A unit test fails when one of the files is not what this would write.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from app.cli.meanings import Process, Setting, range_of, settings_of, sim_settings  # noqa: E402
from app.cli.plan import PER_PROCESS, UpOptions  # noqa: E402
from app.cli.up_options import Whole, up_parser  # noqa: E402

PAGE = ROOT / "docs" / "settings.md"
OF_CHART = ROOT / "helm" / "hotspare" / "files" / "settings.json"
NOT_IN_A_POD = {
    *("HOTSPARE_PARENT_PID", "HOTSPARE_GMS_PARENT_PID"),
    *("HOTSPARE_GMS_SOCKET", "HOTSPARE_GMS_RUN_DIR", "HOTSPARE_GMS_POD"),
    *("HOTSPARE_WORKERS", "HOTSPARE_WORKERS_FILE", "HOTSPARE_WORKERS_DNS", "HOTSPARE_WORKERS_KUBERNETES"),
}
"""Settings of processes whose parent or whose neighbours are elsewhere than the chart's are."""
HEAD = """\
# Settings

<!-- Written by scripts/settings_doc.py from the settings classes; a unit test fails when it is stale. -->

Every setting is an environment variable, and most are a flag of their process, too; flags win, and `hotspare COMMAND
--help` explains them. A bad value refuses to start, with a sentence and exit code 2. `hotspare` refuses variables that
begin with `HOTSPARE_` and are not on this page; variables of another process are ignored, unless it is one that this
one starts. Durations are seconds and sizes bytes unless the name says otherwise. *Values* are a number's bounds, both
included ("above 0": without 0), or the words that there are. Switches are `true` or `false` as variables (`1` and `0`,
`yes` and `no`, `on` and `off`, `t` and `f`, `y` and `n` are understood, too, in upper or lower case) and `--name` or
`--no-name` as flags. Where a setting has several variables, the first one that is set wins.

`hotspare up` passes its whole environment on to the processes that it starts, so the tables below its own hold there,
too. It sets these for each process on its own, and from the outside they are ignored:
{per_process}.
"""
OTHERS = """\
| variable | read by | meaning |
| --- | --- | --- |
| `HOTSPARE_API_KEY` | `status`, `up`, `bench` | The key that they show to the gateway; without it, the first of \
`HOTSPARE_API_KEYS` or of the file that `HOTSPARE_API_KEYS_FILE` names, if they are set for the command, too. |
| `HOTSPARE_MODEL_CACHE` | vLLM engines | Folder where the embedded model is kept once it has been converted. \
Unset: `hotspare` in `XDG_CACHE_HOME`. |
"""
GATEWAY = (
    ("Listening and processes", ("host", "port", "processes", "run_dir", "parent_pid")),
    ("Workers", ("workers", "kubernetes_", "discovery_", "worker_token", "heartbeat_", "attempt_limit", "health_")),
    ("Resumes", ("resume",)),
    ("Keys and TLS", ("api_keys", "tls_certificate", "tls_key")),
    ("Time limits", ("_seconds",)),
    ("Sizes and numbers", ("max_",)),
    ("Pages in a browser (CORS)", ("cors_",)),
    ("Logs and traces", ("log_", "access_log", "otlp_")),
)
"""Groups of the gateway's settings, and how their names begin (or end, with ``_`` in front)."""
SHARED = """\
A pod hands these on to its engines, together with settings in its environment that are for engines alone; an engine
that is started by itself must be told the same. Its memory service likewise reads the variables of `hotspare gms` in
the pod's environment, except for socket, device and metrics port, which are the pod's; of two memory limits the pod's
own (`HOTSPARE_GMS_MEMORY_LIMIT_BYTES`) wins, and `HOTSPARE_GMS_MEMORY_LIMIT` holds where that is 0.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD.format(per_process=wrapped(sorted(PER_PROCESS))), section("`hotspare up`", up_settings())]
    parts.append("## `hotspare gateway`\n")
    parts += [section(title, settings, level=3) for title, settings in grouped(settings_of(Process.GATEWAY))]
    pod, engine = settings_of(Process.POD), settings_of(Process.ENGINE)
    shared = {name: setting for name, setting in pod.items() if engine.get(name) == setting}
    parts.append(section("`hotspare pod` and its `hotspare engine`", shared.values(), before=SHARED))
    parts.append(section("`hotspare pod` alone", rest(pod, shared)))
    parts.append(section("`hotspare engine` alone", rest(engine, shared)))
    parts.append(section("The sim engine", sim_settings().values()))
    parts.append(section("`hotspare gms`", settings_of(Process.GMS).values()))
    parts.append(f"## Other variables\n\n{OTHERS}")
    return "\n".join(parts)


def of_chart() -> str:
    """Component of the chart → HOTSPARE_ names that its processes and the commands in its containers read, as JSON."""
    of = {
        "gateway": [*settings_of(Process.GATEWAY).values()],
        "worker": [
            *settings_of(Process.ENGINE).values(),
            *sim_settings().values(),
            *settings_of(Process.GMS).values(),
        ],
    }
    more = {"gateway": {"HOTSPARE_API_KEY"}, "worker": {"HOTSPARE_MODEL_CACHE"}}
    names = {
        component: sorted(
            {name for setting in settings for name in setting.variables if name.startswith("HOTSPARE_")}.union(
                more[component]
            ).difference(NOT_IN_A_POD)
        )
        for component, settings in of.items()
    }
    return json.dumps(names, indent=2) + "\n"


def grouped(settings: Mapping[str, Setting]) -> Iterator[tuple[str, list[Setting]]]:
    """The gateway's settings in groups; one that fits nowhere is a mistake here."""
    left = dict(settings)
    # What begins like a group's names belongs there, and not where it ends like another's.
    found: dict[str, list[str]] = {title: [] for title, _ in GATEWAY}
    for by_end in (False, True):
        for title, marks in GATEWAY:
            ends = tuple(mark for mark in marks if mark.startswith("_"))
            begins = tuple(mark for mark in marks if not mark.startswith("_"))
            names = [name for name in left if (name.endswith(ends) if by_end else name.startswith(begins))]
            found[title] += names
            for name in names:
                del left[name]
    if left:
        raise SystemExit(f"scripts/settings_doc.py: these belong to no group in GATEWAY: {', '.join(left)}")
    for title, names in found.items():
        yield title, [settings[name] for name in names]


def rest(settings: Mapping[str, Setting], shared: Container[str]) -> list[Setting]:
    return [setting for name, setting in settings.items() if name not in shared]


def up_settings() -> list[Setting]:
    """The options of ``up``, from its parser."""
    return [
        Setting(
            variables=(f"HOTSPARE_{action.dest.upper()}",),
            flag=" / ".join(action.option_strings),
            default=default_of(action.dest),
            meaning=(action.help or "").partition(" (default: ")[0],
            values=values_of(action),
        )
        for action in up_parser()._actions
        if action.dest != "help"
    ]


def values_of(action: argparse.Action) -> str:
    if isinstance(action, argparse.BooleanOptionalAction):
        return "true, false"
    if isinstance(action.type, Whole):
        return range_of(ge=action.type.least, le=action.type.most)
    return ", ".join(map(str, action.choices or ()))


def default_of(option: str) -> str:
    value = getattr(UpOptions(), option)
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


def section(title: str, settings: Iterable[Setting], *, before: str = "", level: int = 2) -> str:
    rows = ["| variable | flag | default | values | meaning |", "| --- | --- | --- | --- | --- |", *map(row, settings)]
    return "\n".join([f"{'#' * level} {title}", "", *([before] if before else []), *rows, ""])


def row(setting: Setting) -> str:
    variables = ", ".join(f"`{name}`" for name in setting.variables)
    flag = ", ".join(f"`{name}`" for name in setting.flag.split(" / ") if name)
    default = f"`{setting.default}`" if setting.default else ""
    meaning = setting.meaning.replace("``", "`").replace("|", "\\|")
    return f"| {variables} | {flag} | {default} | {setting.values} | {meaning} |"


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
    OF_CHART.write_text(of_chart())
