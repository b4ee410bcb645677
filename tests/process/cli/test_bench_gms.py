"""``hotspare bench gms``, small: it runs to its end, prints what it promises, and leaves nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.machine import hotspare

pytestmark = pytest.mark.process

SECONDS = [
    "attach_seconds",
    "bare_map_seconds",
    "status_seconds",
    "echo_seconds",
    "kv_map_large_seconds",
    "kv_map_small_seconds",
    "adopt_seconds",
    "service_start_seconds",
]
OTHERS = [
    "attach_ratio",
    "status_ratio",
    "kv_map_ratio",
    "checksum_ratio",
    "checksum_gb_per_second",
    "copy_gb_per_second",
    "weights_bytes",
    "kv_bytes",
    "tensors",
]


def test_every_figure_is_printed_and_nothing_is_left(tmp_path: Path) -> None:
    done = hotspare(*["bench", "gms", "--weights-mib", "16", "--kv-mib", "32", "--json"], env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report) == {*SECONDS, *OTHERS}
    assert all(report[name] > 0 for name in report)
    assert all(report[name] < 10 for name in SECONDS)
    assert (report["weights_bytes"], report["kv_bytes"]) == (16 << 20, 32 << 20)
    assert report["service_start_seconds"] < report["adopt_seconds"]
    assert list(tmp_path.iterdir()) == []


def test_the_table_has_a_row_for_each(tmp_path: Path) -> None:
    done = hotspare(*["bench", "gms", "--weights-mib", "16", "--kv-mib", "16"], env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    for words in ("attach ÷ bare", "status ÷ echo", "all ÷ a sixteenth", "taken back, hashed", "GB/s"):
        assert words in done.stdout
