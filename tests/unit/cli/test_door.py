from __future__ import annotations

import os
import ssl
import subprocess
from pathlib import Path

import pytest

from app.cli.door import client_key, key_headers, key_in_a_shell, trust_only


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
    file = tmp_path / "the keys"
    file.write_text("# first\nfrom-the-file\nsecond\n")
    environment = {name: value.replace("FILE", str(file)) for name, value in environment.items()}
    assert client_key(environment) == key
    shown = f'printf %s "{key_in_a_shell(environment)}"'  # which finds the same one
    assert (
        subprocess.check_output(["/bin/sh", "-c", shown], env=environment | {"PATH": "/usr/bin:/bin"})
        == (key or "").encode()
    )


def test_the_header() -> None:
    assert key_headers(None) == {}
    assert key_headers("k") == {"authorization": "Bearer k"}


def test_a_certificate_that_is_no_plain_file_is_not_waited_for(tmp_path: Path) -> None:
    pipe, large, other = tmp_path / "pipe", tmp_path / "large", tmp_path / "other"
    os.mkfifo(pipe)
    large.write_bytes(b"x" * ((1 << 20) + 1))
    other.write_bytes(b"no certificate")
    for path, why in ((pipe, "not a regular file"), (large, "larger than"), (tmp_path / "none", "No such file")):
        with pytest.raises(OSError, match=why) as found:
            trust_only(path)
        assert found.value.filename == str(path)
    with pytest.raises(ssl.SSLError):
        trust_only(other)
