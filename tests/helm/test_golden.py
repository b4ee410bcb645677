"""What some values lead to, whole: a change shows in the diff of golden/.

HOTSPARE_WRITE_GOLDEN=1 writes the files instead.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import chart

GOLDEN = Path(__file__).parent / "golden"
CASES = ("default", "gpu", "ranks", "scaled", "secured")


@pytest.mark.parametrize("case", CASES)
def test_golden(case: str) -> None:
    path = GOLDEN / f"{case}.yaml"
    manifest = chart.rendered(case)
    if os.environ.get("HOTSPARE_WRITE_GOLDEN") == "1":
        path.write_text(manifest)
    assert manifest == path.read_text(), "changed: look at it, and write it with HOTSPARE_WRITE_GOLDEN=1"


def test_no_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)
