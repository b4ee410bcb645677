"""vLLM's load format ``gms``: the first engine loads the checkpoint into the memory service, the others map it.

What is shared and what is cloned is said in ``gms.tensors``. Kernels that repack weights into private copies (oneDNN,
SGL) are off in these engines: sharing is what the service is for, and both engines of a pair must compute the same way.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import logging
import time
from pathlib import Path
from typing import Any

import torch
import vllm._custom_ops as custom_ops
import vllm.model_executor.layers.utils as layer_utils
from vllm import __version__ as vllm_version
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.model_executor.utils import weights_already_processed
from vllm.utils.torch_utils import set_default_torch_dtype

from gms import tensors
from workers.engines.vllm.arguments import Placement
from workers.engines.vllm.weights import layout_key, read_manifest
from workers.weights import ARENA_TAG, WeightsMemory, pool_name

logger = logging.getLogger(__name__)

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
        service = Placement.from_config(load_config.model_loader_extra_config).service
        if service is None:
            raise ValueError("load format 'gms' needs a memory service")
        self._service = service
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
        keep_weights_unpacked()
        started = time.monotonic()
        key = layout_key(
            Path(model_config.model),
            dtype=str(model_config.dtype),
            quantization=model_config.quantization,
            rank=get_tensor_model_parallel_rank(),
            world_size=get_tensor_model_parallel_world_size(),
            engine_version=vllm_version,
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
        logger.info("weights: %s, %.2f s", weights.role, time.monotonic() - started)
        return model.eval()

    def _write(self, weights: WeightsMemory, vllm_config: Any, model_config: Any, prefix: str) -> Any:
        model = self._from_disk.load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        manifest, stored = tensors.plan(model, tag=ARENA_TAG)
        tensors.pack(manifest, stored, tensors.arena(weights.map_for_writing(manifest.size_bytes)))
        weights.commit(manifest.encode())
        del stored
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # the loader's private copies: large pages of the heap, free now
        return model

    def _read(self, weights: WeightsMemory, vllm_config: Any, model_config: Any, prefix: str) -> Any:
        manifest = read_manifest(weights)
        with set_default_torch_dtype(model_config.dtype), torch.device("meta"):
            model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        arena = tensors.arena(weights.map_for_reading())
        tensors.install(model, manifest, arena)
        with set_default_torch_dtype(model_config.dtype), weights_already_processed():
            process_weights_after_loading(model, model_config, arena.device)
        tensors.fill_empty(model, arena.device)  # the KV cache's placeholders are such
        if left := tensors.unfilled(model):
            raise ValueError(
                f"this model cannot be read from shared weights: the writer had no values for {len(left)} of its "
                f"tensors, {left[0]} among them; run it with HOTSPARE_GMS=false"
            )
        return model


def keep_weights_unpacked() -> None:
    """Choose kernels that compute on the weights as they lie in memory.

    vLLM has no setting for it. Called in the engine's own process before any layer is built; every engine of a pair
    does, so that their numbers agree.
    """
    custom_ops._supports_onednn = False
    layer_utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
