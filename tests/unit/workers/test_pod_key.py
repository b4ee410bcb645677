"""The pod's key: one for all its processes, whole, and for its user alone."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from workers.pod_files import PodFolder
from workers.pod_key import HEADER_POD_KEY, KEY_FILE, PodKeyError, pod_key, read_pod_key, shows


def test_whoever_comes_first_makes_it_and_all_have_the_same(tmp_path: Path) -> None:
    keys: list[str] = []
    threads = [threading.Thread(target=lambda: keys.append(pod_key(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8
    assert len(set(keys)) == 1
    assert read_pod_key(tmp_path) == keys[0]
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == [KEY_FILE]


@pytest.mark.parametrize("content", [b"", b"\n", "schlüssel".encode()])
def test_a_file_without_a_key_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / KEY_FILE).write_bytes(content)
    with pytest.raises(PodKeyError, match="holds no key"):
        pod_key(tmp_path)


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(PodKeyError, match="nowhere"):
        pod_key(tmp_path / "nowhere")
    with pytest.raises(PodKeyError, match="cannot be read"):
        read_pod_key(tmp_path)


@pytest.mark.parametrize(("shown", "good"), [(b"k1", True), (b"k2", False), (b"", False), (None, False)])
def test_who_shows_it(shown: bytes | None, good: bool) -> None:
    headers = [(b"host", b"k1"), *([] if shown is None else [(HEADER_POD_KEY.encode(), shown)])]
    assert shows(headers, "k1") is good


def test_it_goes_with_the_pod(tmp_path: Path) -> None:
    folder = PodFolder(tmp_path / "pod-0")
    folder.open()
    pod_key(tmp_path / "pod-0")
    folder.clean()
    folder.close()
    assert not (tmp_path / "pod-0").exists()
