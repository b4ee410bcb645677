from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from workers import engine_folder


def test_it_is_made_empty_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "pod" / "engine-a"
    engine_folder.make_empty(folder)
    (folder / "socket").touch()
    engine_folder.make_empty(folder)
    assert list(folder.iterdir()) == []
    assert folder.stat().st_mode & 0o777 == 0o700
    engine_folder.remove(folder)
    engine_folder.remove(folder)
    assert not folder.exists()


@pytest.mark.parametrize("times", [1, 100])
def test_one_that_somebody_still_writes_to_is_tried_again_and_then_left(
    tmp_path: Path, times: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "engine-a"
    engine_folder.make_empty(folder)
    removes, tried = shutil.rmtree, []

    def not_empty(path: Any) -> None:
        tried.append(path)
        if len(tried) <= times:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        removes(path)

    monkeypatch.setattr(shutil, "rmtree", not_empty)
    engine_folder.remove(folder)
    assert folder.exists() is (times == 100)
    assert ("cannot be removed, and is left: [Errno 39] Directory not empty" in caplog.text) is (times == 100)
    engine_folder.make_empty(folder)
    assert folder.exists()
