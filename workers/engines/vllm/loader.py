"""vLLM's load format ``gms``: the first engine loads the checkpoint into the memory service, the others map it.

What is shared and what is cloned is said in ``gms.tensors``. On a CPU, matrices are shared as oneDNN has packed them
(``packed``); other kernels that repack weights into private copies are off: sharing is what the service is for, and
both engines of a pair must compute the same way. On a GPU weights are shared as vLLM's kernels want them, after it has
processed them: a reader tells vLLM that this was done, and a method of quantisation that cannot take that is refused by
whoever would write.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from vllm import __version__ as vllm_version
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.model_executor.utils import weights_already_processed
from vllm.utils.torch_utils import set_default_torch_dtype

from gms import tensors
from workers.engines.vllm import packed
from workers.engines.vllm.arguments import Placement
from workers.engines.vllm.weights import layout_key, read_manifest
from workers.weights import ARENA_TAG, WeightsMemory, pool_name

logger = logging.getLogger(__name__)

_MARGIN_BYTES: Final = 1 << 30
"""What a GPU should have left while weights are there twice: chunks are whole, and others use it too."""
_ATTRIBUTE = "hotspare_weights"
"""Attribute of the model that keeps the mapping alive as long as the tensors over it."""


def weights_of(model: Any) -> WeightsMemory | None:
    """The service's pages behind a model that this loader made."""
    weights = getattr(model, _ATTRIBUTE, None)
    return weights if isinstance(weights, WeightsMemory) else None


class GmsModelLoader(BaseModelLoader):
    """Registered as load format ``gms`` (``plugin.register``)."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self._service = Placement.from_config(load_config.model_loader_extra_config).service
        self._packs = False
        self._from_disk = DefaultModelLoader(
            dataclasses.replace(load_config, load_format="auto", model_loader_extra_config={})
        )

    def download_model(self, model_config: Any) -> None:
        self._from_disk.download_model(model_config)

    def load_weights(self, model: Any, model_config: Any) -> None:
        raise NotImplementedError("the weights of a GMS engine are shared and read-only: they cannot be loaded again")

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """Load as writer or as reader, whichever the service grants.

        Raises:
            gms.client.GmsError: no service, no memory, or no commit in time.
            ValueError: the model holds tensors that cannot be shared this way.
        """
        on_gpu = vllm_config.device_config.device_type == "cuda"
        self._packs = self._service.device.startswith("cpu:") and packed.usable()
        started = time.monotonic()
        key = layout_key(
            Path(model_config.model),
            dtype=str(model_config.dtype),
            quantization=model_config.quantization,
            rank=get_tensor_model_parallel_rank(),
            world_size=get_tensor_model_parallel_world_size(),
            engine_version=vllm_version,
            # Which kernels a GPU gets, and so how its weights lie, follows from all of it.
            configuration=vllm_config.compute_hash() if on_gpu else _cpu_kernels(self._packs),
        )
        weights = WeightsMemory(self._service, pool_name(key))
        try:
            weights.attach()
            load = self._write if weights.role == "writer" else self._read
            model = load(weights, vllm_config, model_config, prefix)
        except BaseException:
            weights.close()
            raise
        setattr(model, _ATTRIBUTE, weights)
        held = measure(model)
        logger.info(
            "weights: %s, %.2f s, %d MiB of which %d are this engine's own; %d MiB of other tensors",
            weights.role,
            time.monotonic() - started,
            held.weights_bytes >> 20,
            held.private_weights_bytes >> 20,
            held.other_bytes >> 20,
        )
        return model.eval()

    def _write(self, weights: WeightsMemory, vllm_config: Any, model_config: Any, prefix: str) -> Any:
        noted: dict[str, packed.Handler] = {}
        if self._packs:
            with packed.recording() as handlers:
                model = self._from_disk.load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
            noted = packed.note(model, handlers)
        else:
            with packed.unpacked():
                model = self._from_disk.load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        check_shareable(model)
        manifest, stored = tensors.plan(model, tag=ARENA_TAG)
        device = vllm_config.device_config.device_type
        if device == "cuda" and not _room_on_gpu(manifest.size_bytes):
            logger.info("weights: there is no room for them twice; they go by way of the host's memory")
            tensors.unload(manifest, stored, device=device)
            _give_back(device)
        tensors.pack(manifest, stored, tensors.arena(weights.map_for_writing(manifest.size_bytes)))
        del stored
        _give_back(device)
        weights.commit(manifest.encode())
        packed.share(model, noted, weights)
        return model

    def _read(self, weights: WeightsMemory, vllm_config: Any, model_config: Any, prefix: str) -> Any:
        manifest = read_manifest(weights)
        with set_default_torch_dtype(model_config.dtype), torch.device("meta"):
            model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        check_shareable(model)
        arena = tensors.arena(weights.map_for_reading())
        tensors.install(model, manifest, arena, in_part=True)
        with set_default_torch_dtype(model_config.dtype), weights_already_processed(), packed.unpacked():
            process_weights_after_loading(model, model_config, arena.device)
        tensors.fill_empty(model, arena.device)  # the KV cache's placeholders are such
        if left := tensors.unfilled(model):
            raise ValueError(
                f"this model cannot be read from shared weights: the writer had no values for {len(left)} of its "
                f"tensors, {left[0]} among them; run it with HOTSPARE_GMS=false"
            )
        packed.install(model, weights)
        return model


class Held(NamedTuple):
    """Where a model's bytes are. Tensors over one storage count once."""

    weights_bytes: int
    """All Parameters."""
    private_weights_bytes: int
    """Parameters that are not in the service's pages."""
    other_bytes: int
    """Buffers and attributes, which each engine has its own of, if they are no views of a Parameter."""


def measure(model: Any, *, beside: Iterable[Any] = ()) -> Held:
    """By the tensors' real addresses. What is over the storages of ``beside`` does not count: layers have the KV cache
    as an attribute."""
    weights = weights_of(model)
    parameters = storage_sizes(model.parameters())
    other = storage_sizes(tensors.all_of(model))
    for at in (*parameters, *storage_sizes(beside)):
        other.pop(at, None)

    def private(sizes: dict[int, int]) -> int:
        return sum(size for at, size in sizes.items() if weights is None or not weights.holds(at, size))

    return Held(sum(parameters.values()), private(parameters), private(other))


def storage_sizes(of: Iterable[Any]) -> dict[int, int]:
    """Bytes by address. What has no elements has no storage."""
    storages = (tensor.untyped_storage() for tensor in of)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def check_shareable(model: Any) -> None:
    """Refuse what a reader could not finish. A writer asks too, before anybody waits for what it would commit.

    Raises:
        ValueError: a layer's weights are processed in a way that vLLM cannot skip.
    """
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and not method.supports_pre_processed_weights:
            raise ValueError(
                f"the weights of {name or 'the model'} cannot be shared: vLLM's {type(method).__name__} does not take "
                "weights that were processed already; run it with HOTSPARE_GMS=false, or quantised in another way"
            )


def _room_on_gpu(size_bytes: int) -> bool:
    """Whether so much is free beside what this engine holds already."""
    torch.accelerator.empty_cache()
    free, _ = torch.accelerator.get_memory_info()
    return bool(free >= size_bytes + _MARGIN_BYTES)


def _give_back(device: str) -> None:
    """The loader's private copies are free now, but still this process's."""
    gc.collect()
    if device == "cuda":
        torch.accelerator.empty_cache()
    else:
        ctypes.CDLL(None).malloc_trim(0)  # large pages of the heap


def _cpu_kernels(packs: bool) -> str:
    """What decides how weights lie on a CPU."""
    return f"oneDNN packed for {torch.backends.cpu.get_cpu_capability()}" if packs else ""
