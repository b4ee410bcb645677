"""Scenarios as files: YAML, by name or by path."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from app.cli.bench.loadtest.scenario import Scenario, ScenarioError, parse
from app.plain_file import read_small

FOLDER: Final = Path(__file__).parent / "scenarios"
MAX_BYTES: Final = 1 << 20


def names() -> list[str]:
    """Those that come along."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_scenario(given: str) -> Scenario:
    """A scenario by its name, or from a file.

    Raises:
        ScenarioError: there is none, or something in it does not fit.
    """
    path = FOLDER / f"{given}.yaml"
    if given not in names():
        path = Path(given)
        if not path.is_file():
            raise ScenarioError(f"there is no scenario {given!r}, and no such file; scenarios: {', '.join(names())}")
    try:
        text = read_small(path, MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path} cannot be read: {error}") from None
    return parse(_yaml(text, path), name=str(path))


def _yaml(text: str, path: Path) -> Any:
    import yaml

    class OnceOnly(yaml.SafeLoader):
        """Of a key that stands there twice, YAML would take the last one."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = {key for key in keys if keys.count(key) > 1}
            if twice:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {twice.pop()!r} stands there twice", node.start_mark
                )
            return super().construct_mapping(node, deep=deep)

    try:
        return yaml.load(text, Loader=OnceOnly)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, TypeError) as error:
        raise ScenarioError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
