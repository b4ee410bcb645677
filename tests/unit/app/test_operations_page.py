"""docs/operations.md, api.md, metrics.md and realtime.md against the code: errors and names of metrics."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from app.openai import realtime_events
from app.openai.errors import from_status

ROOT = Path(__file__).parents[3]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
API = (ROOT / "docs" / "api.md").read_text()
REALTIME = (ROOT / "docs" / "realtime.md").read_text()
METRICS = (ROOT / "docs" / "metrics.md").read_text()
ROW = re.compile(r"^\| (`[^|]+`) \| ([^|]+) \| ([^|]+) \| (yes|no) \| [^|]+ \| [^|]+ \|$", re.MULTILINE)
CODE = re.compile(r"`([a-z_]+)`")
NAME = re.compile(r"\bhotspare_[a-z_]+[a-z]\b")
SUFFIX = re.compile(r"_(total|bucket|sum|count)$")
SOURCES = [
    *(ROOT / folder / "metrics.py" for folder in ("app/telemetry", "workers", "gms")),
    ROOT / "app/telemetry/tallies.py",
    ROOT / "app/telemetry/interruptions.py",
]


def calls(name: str) -> Iterator[ast.Call]:
    """Every call of ``name`` in the gateway."""
    for path in (ROOT / "app").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
                yield node


def errors_in_the_code() -> dict[str, set[tuple[str, str, bool]]]:
    """Code → status, fault, retryable; a status that somebody else chooses is its class."""
    found: dict[str, set[tuple[str, str, bool]]] = defaultdict(set)
    for call in calls("GatewayError"):
        status, code, more = call.args[0], call.args[1], {item.arg: item.value for item in call.keywords}
        fault, retryable = more["fault"], more.get("retryable")
        if not isinstance(code, ast.Constant) or not isinstance(fault, ast.Constant):
            continue  # that one is from_status, asked below
        said = str(status.value) if isinstance(status, ast.Constant) else "4xx"
        found[code.value].add((said, fault.value, isinstance(retryable, ast.Constant) and retryable.value))
    for status in range(400, 600):
        error = from_status(status, "why")
        if error.code not in ("not_found", "method_not_allowed"):
            said = "400" if error.status == 400 else "4xx" if status < 500 else "5xx"
            found[error.code].add((said, error.fault, error.retryable))
    return found


def test_every_error_is_in_the_table() -> None:
    rows = [
        (code, statuses.split(", "), faults.split(", "), again == "yes")
        for codes, statuses, faults, again in ROW.findall(OPERATIONS)
        for code in CODE.findall(codes)
    ]
    said = {code: (set(statuses), set(faults), again) for code, statuses, faults, again in rows}
    assert len(said) == len(rows) > 25
    known = {
        code: ({it[0] for it in ways}, {it[1] for it in ways}, any(it[2] for it in ways))
        for code, ways in errors_in_the_code().items()
    }
    assert said == known


def test_every_code_of_a_realtime_event_is_in_the_docs() -> None:
    paragraph = REALTIME.partition("**Codes of `error` events**")[2].partition("\n\n")[0]
    codes = {code for code, _ in realtime_events._UNSUPPORTED.values()}
    for call in calls("RealtimeProblem"):
        if call.args and isinstance(call.args[0], ast.Constant):
            codes.add(call.args[0].value)
    assert len(codes) > 15
    assert codes <= set(CODE.findall(paragraph)), "they belong into docs/realtime.md"


def test_the_docs_name_no_metric_that_is_not_there() -> None:
    source = "".join(path.read_text() for path in SOURCES)
    known = {SUFFIX.sub("", name) for name in re.findall(r'"(hotspare_[a-z_]+)"', source)}
    named = set(NAME.findall(OPERATIONS + API + METRICS + REALTIME))
    assert len(named) > 40
    assert {name for name in named if SUFFIX.sub("", name) not in known} - {"hotspare_client_disconnects"} == set()


def test_every_metric_of_engines_and_of_the_memory_service_has_a_row() -> None:
    """With its labels. Families that are made at each scrape are found in the source."""
    for source in ("workers/metrics.py", "gms/metrics.py"):
        found = 0
        for node in ast.walk(ast.parse((ROOT / source).read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not node.args:
                continue
            name = node.args[0]
            if not isinstance(name, ast.Constant) or not str(name.value).startswith("hotspare_"):
                continue
            found += 1
            row = re.search(rf"^\| `{name.value}` \|([^|]*)\| [^|]+ \|$", METRICS, re.MULTILINE)
            assert row, f"{name.value} has no row in docs/metrics.md"
            lists = [item for item in (*node.args, *(key.value for key in node.keywords)) if isinstance(item, ast.List)]
            labels = [part.value for items in lists for part in items.elts if isinstance(part, ast.Constant)]
            said = [part.strip() for part in re.sub(r"\([^)]*\)", "", row[1]).split(",") if part.strip()]
            assert said == labels, name.value
        assert found > 5, source
