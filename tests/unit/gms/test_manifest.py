"""The standard form of a manifest."""

from __future__ import annotations

import msgspec
import pytest

from gms.manifest import ALIGNMENT, Manifest, Slot, SlotPlanner
from gms.protocol import MAX_MANIFEST

SLOT = Slot(offset=0, size_bytes=8, shape=(2,), stride=(1,), storage_offset=0, dtype="float32")
FULL = Manifest(
    tag="weights",
    size_bytes=3 * ALIGNMENT,
    parameters={"w": SLOT},
    buffers={"b": msgspec.structs.replace(SLOT, offset=ALIGNMENT, device="cuda")},
    attributes={"a": msgspec.structs.replace(SLOT, offset=2 * ALIGNMENT, shape=(), stride=())},
    aliases={"tied": "w"},
)


def test_storages_do_not_share_pages() -> None:
    planner = SlotPlanner()
    assert [planner.place(size) for size in (1, ALIGNMENT, ALIGNMENT + 1, 0, 1)] == [
        0,
        ALIGNMENT,
        2 * ALIGNMENT,
        4 * ALIGNMENT,
        5 * ALIGNMENT,
    ]
    assert planner.size_bytes == 6 * ALIGNMENT


def test_a_manifest_survives_the_service() -> None:
    assert Manifest.decode(FULL.encode()) == FULL
    assert FULL.slots().keys() == {"w", "b", "a"}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"a manifest of somebody else's",
        FULL.encode()[:-1],
        FULL.encode() + b"\0",
        msgspec.msgpack.encode({"size_bytes": 8, "parameters": {}, "buffers": {}, "aliases": {}}),
        msgspec.msgpack.encode({**msgspec.to_builtins(FULL), "type": "tensors", "size_bytes": "many"}),
        msgspec.msgpack.encode({**msgspec.to_builtins(FULL), "type": "other"}),
        msgspec.msgpack.encode({**msgspec.to_builtins(FULL), "type": "tensors", "parameters": {"w": [0, 8, [2]]}}),
    ],
    ids=["nothing", "text", "cut off", "trailing", "no tag", "wrong type", "another form", "half a slot"],
)
def test_other_bytes_are_no_manifest(raw: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        Manifest.decode(raw)


def test_ten_thousand_tensors_fit_into_a_message() -> None:
    slot = Slot(
        offset=1 << 40, size_bytes=1 << 30, shape=(65536, 65536), stride=(65536, 1), storage_offset=0, dtype="bfloat16"
    )
    names = [
        f"model.language_model.layers.{number // 10}.mlp.experts.{number}.w13_weight_scale" for number in range(10_000)
    ]
    manifest = Manifest(
        tag="weights", size_bytes=1 << 41, parameters=dict.fromkeys(names, slot), buffers={}, aliases={}
    )
    assert len(manifest.encode()) < MAX_MANIFEST
