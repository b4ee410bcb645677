"""The chart's own papers: versions, the README's table, the notes, and the question that `helm test` asks."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from types import ModuleType

import pytest
import yaml

from tests.support import chart


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("chart_doc", chart.ROOT / "scripts" / "chart_doc.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # its dataclass looks itself up
        spec.loader.exec_module(module)
        yield module


def test_the_table_is_up_to_date(script: ModuleType) -> None:
    assert script.PAGE.read_text() == script.current_page(), "stale: run .venv/bin/python scripts/chart_doc.py"


def test_a_value_without_a_comment_is_refused(script: ModuleType) -> None:
    with pytest.raises(script.CommentMissing, match=r"gateway\.ports has no comment"):
        script.page("gateway:\n  # How many.\n  replicas: 2\n  ports: 3\n", "")


def test_a_row_has_the_whole_comment_and_the_default(script: ModuleType) -> None:
    text = '# All of it.\ngateway:\n  # First\n  # and | second.\n  some: {a: [1]}\n  # Empty.\n  none: ""\n'
    assert '| `gateway.some` | `{"a": [1]}` | First and \\| second. |' in script.page(text, "")
    assert '| `gateway.none` | `""` | Empty. |' in script.page(text, "")
    assert "### `gateway`\n\nAll of it.\n" in script.page(text, "")


def test_the_readme_knows_what_the_defaults_request() -> None:
    said = re.sub(r"\s+", " ", (chart.CHART / "README.md").read_text())
    (worker,) = [pod for owner, pod in chart.pods(chart.of("default")) if owner.startswith("StatefulSet")]
    memory = sum(chart.in_bytes(it["resources"]["requests"]["memory"]) for it in chart.containers(worker))
    cores = sum(int(it["resources"]["requests"]["cpu"].removesuffix("m")) for it in chart.containers(worker)) / 1000
    assert f"requests {memory / 2**30:.1f} GiB of memory and {cores:.1f} CPUs" in said


def test_one_version() -> None:
    meta = yaml.safe_load((chart.CHART / "Chart.yaml").read_text())
    project = tomllib.loads((chart.ROOT / "pyproject.toml").read_text())["project"]
    assert meta["version"] == meta["appVersion"] == project["version"]


def test_the_schema_knows_every_value() -> None:
    """And no other: what has properties there has the same keys in values.yaml."""
    schema = json.loads((chart.CHART / "values.schema.json").read_text())

    def compare(node: dict[str, object], values: object, path: str) -> None:
        if "$ref" in node:
            node = schema["definitions"][str(node["$ref"]).rpartition("/")[2]]
        properties = node.get("properties")
        if not isinstance(properties, dict) or not isinstance(values, dict):
            return
        if node.get("additionalProperties") is False and not path.endswith(
            ("Probe", "esources", "updateStrategy", "affinity")
        ):
            assert set(properties) - {"global"} == set(values), path
        for name in properties.keys() & values.keys():
            compare(properties[name], values[name], f"{path}.{name}")

    compare(schema, yaml.safe_load((chart.CHART / "values.yaml").read_text()), "")


@pytest.mark.parametrize(
    ("case", "url", "model", "key"),
    [
        ("default", "curl http://localhost:8000/v1/chat/completions", "smollm2", ""),
        ("sim", "curl http://localhost:8000/v1/chat/completions", "sim", ""),
        (
            "secured",
            "curl --cacert ca.crt --connect-to ::localhost:8000 https://chat-gateway.llm.svc/v1/chat/completions",
            "smollm2",
            ' -H "authorization: Bearer $KEY"',
        ),
        (
            "verified",
            "curl --cacert ca.crt --connect-to ::localhost:8000 https://chat.example.com/v1/chat/completions",
            "smollm2",
            ' -H "authorization: Bearer $KEY"',
        ),
        ("image-volume", "curl http://localhost:8000/v1/chat/completions", "MODEL", ""),
    ],
)
def test_the_notes_have_a_curl(case: str, url: str, model: str, key: str) -> None:
    values = str(chart.CASES / f"{case}.yaml")
    said = chart.run_helm(
        "helm", "install", chart.RELEASE, str(chart.CHART), "--namespace", chart.NAMESPACE, "--values", values,
        "--dry-run=client",
    )  # fmt: skip
    notes = said.partition("NOTES:")[2]
    command = re.search(r"^  (curl (?:.|\n)*?}')$", notes, re.MULTILINE)
    assert command is not None
    assert command[1].startswith(f"{url} -H 'content-type: application/json'{key} -d '{{")
    body = yaml.safe_load(command[1].partition("-d '")[2].removesuffix("'"))
    assert body["model"] == model
    service = "chat-gateway" if case == "secured" else "demo-hotspare-gateway"
    assert f"port-forward service/{service} 8000:" in notes
    assert "<no value>" not in said
