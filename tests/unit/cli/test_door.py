from __future__ import annotations

from pathlib import Path

import pytest

from app.cli.door import client_key, key_headers


@pytest.mark.parametrize(
    ("environment", "key"),
    [
        ({}, None),
        ({"HOTSPARE_API_KEY": "mine", "HOTSPARE_API_KEYS": "a,b"}, "mine"),
        ({"HOTSPARE_API_KEY": "", "HOTSPARE_API_KEYS": "a,b"}, "a"),
        ({"HOTSPARE_API_KEYS": "a,b", "HOTSPARE_API_KEYS_FILE": "FILE"}, "a"),
        ({"HOTSPARE_API_KEYS_FILE": "FILE"}, "from-the-file"),
        ({"HOTSPARE_API_KEYS_FILE": "/nowhere/keys"}, None),
        ({"HOTSPARE_API_KEY": "not a key"}, None),
    ],
)
def test_the_key_that_a_command_shows(tmp_path: Path, environment: dict[str, str], key: str | None) -> None:
    file = tmp_path / "keys"
    file.write_text("# first\nfrom-the-file\nsecond\n")
    assert client_key({name: value.replace("FILE", str(file)) for name, value in environment.items()}) == key


def test_the_header() -> None:
    assert key_headers(None) == {}
    assert key_headers("k") == {"authorization": "Bearer k"}
