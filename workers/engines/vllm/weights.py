"""What a model's weights are called in the memory service, and what is said of them there.

Nothing here knows vLLM or torch; ``loader`` does.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import msgspec

from gms.manifest import FORM, Manifest
from workers.weights import WeightsMemory

_WEIGHT_PATTERNS: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.safetensors.index.json")

_LENGTH_BYTES: Final = 8


def weight_files(folder: Path) -> list[Path]:
    """The files that a checkpoint consists of, in order."""
    return sorted({path for pattern in _WEIGHT_PATTERNS for path in folder.glob(pattern)})


def broken_weights(folder: Path) -> Path | None:
    """The first safetensors file that is none, or is cut off in its header: it begins with the header's length, eight
    bytes. None: all of them have one."""
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            first = file.read(_LENGTH_BYTES)
        if len(first) < _LENGTH_BYTES or int.from_bytes(first, "little") > path.stat().st_size - _LENGTH_BYTES:
            return path
    return None


def layout_key(
    folder: Path,
    *,
    dtype: str,
    quantization: str | None,
    rank: int,
    world_size: int,
    engine_version: str,
    configuration: str = "",
) -> str:
    """Names a layout: two engines with the same key may share pages. ``configuration``: what else decides how weights
    are processed once they are loaded.

    The checkpoint's content is stood for by the names, sizes and modification times of its files, since reading it is
    what sharing avoids.
    """
    files = weight_files(folder)
    described = {
        "config": (folder / "config.json").read_bytes(),
        "files": [(path.name, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files],
        "dtype": dtype,
        "quantization": quantization,
        "rank": (rank, world_size),
        "engine": engine_version,
        "configuration": configuration,
        "manifest": FORM,
    }
    return hashlib.sha256(msgspec.msgpack.encode(described)).hexdigest()


def read_manifest(weights: WeightsMemory) -> Manifest:
    """What the writer committed.

    Raises:
        ValueError: something else than a model of this version was committed under this name.
    """
    try:
        return Manifest.decode(weights.manifest)
    except msgspec.DecodeError as error:
        raise ValueError(f"the pages committed in {weights.pool} are no model's weights: {error}") from error
