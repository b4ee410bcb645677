"""vLLM's load format ``gms``: the first engine loads the checkpoint into the memory service, the others map it.

Parameters are shared read-only. Buffers are small and some are written when a load is finished (attention scales), so a
reader clones them. Kernels that repack weights into private copies (oneDNN, SGL) are off in these engines: sharing is
what the service is for, and both engines of a pair must compute the same way.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import logging
import time
import warnings
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

from workers.engines.vllm.arguments import Placement
from workers.engines.vllm.weights import Manifest, Slot, SlotPlanner, WeightsMemory, check_known, layout_key

logger = logging.getLogger(__name__)

_HOLD = "hotspare_weights"
"""Attribute of the model that keeps the mapping alive as long as the tensors over it."""


def weights_of(model: Any) -> WeightsMemory | None:
    """The hold on the service's pages of a model that this loader made."""
    hold = getattr(model, _HOLD, None)
    return hold if isinstance(hold, WeightsMemory) else None


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
        hold = WeightsMemory.attach(self._service, key)
        try:
            load = self._write if hold.role == "writer" else self._read
            model = load(hold, vllm_config, model_config, prefix)
        except BaseException:
            hold.close()
            raise
        setattr(model, _HOLD, hold)
        logger.info("weights: %s, %.2f s", hold.role, time.monotonic() - started)
        return model.eval()

    def _write(self, hold: WeightsMemory, vllm_config: Any, model_config: Any, prefix: str) -> Any:
        model = self._from_disk.load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        manifest, tensors = plan(model)
        arena = _as_bytes(hold.map_for_writing(manifest.size_bytes))
        for name, slot in {**manifest.parameters, **manifest.buffers}.items():
            _storage_view(arena, slot).copy_(_storage_bytes(tensors[name]))
        for name, slot in manifest.parameters.items():
            tensors[name].data = view(arena, slot)
        hold.commit(manifest)
        del tensors
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # the loader's private copies: large pages of the heap, free now
        return model

    def _read(self, hold: WeightsMemory, vllm_config: Any, model_config: Any, prefix: str) -> Any:
        manifest = hold.manifest
        with set_default_torch_dtype(model_config.dtype), torch.device("meta"):
            model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        arena = _as_bytes(hold.map_for_reading(manifest.size_bytes))
        check_known((name for name, _ in model.named_parameters(remove_duplicate=False)), manifest)
        install(model, manifest, arena)
        with set_default_torch_dtype(model_config.dtype), weights_already_processed():
            process_weights_after_loading(model, model_config, torch.device("cpu"))
        if left := materialize_empty(model):
            raise ValueError(
                f"this model cannot be read from shared weights: {len(left)} of its tensors are neither parameters nor "
                f"buffers of the writer's model, {left[0]} among them; run it with HOTSPARE_GMS=false"
            )
        return model


def keep_weights_unpacked() -> None:
    """Choose kernels that compute on the weights as they lie in memory.

    vLLM has no setting for it. Called in the engine's own process before any layer is built; every engine of a pair
    does, so that their numbers agree.
    """
    custom_ops._supports_onednn = False
    layer_utils.check_cpu_sgl_kernel = lambda n, k, dtype: False


def plan(model: Any) -> tuple[Manifest, dict[str, Any]]:
    """Where each tensor of a loaded model goes, and the tensors by name. Tied tensors are one object, stored once."""
    planner = SlotPlanner()
    parameters: dict[str, Slot] = {}
    buffers: dict[str, Slot] = {}
    aliases: dict[str, str] = {}
    tensors: dict[str, Any] = {}
    names: dict[int, str] = {}
    for slots, named in (
        (parameters, model.named_parameters(remove_duplicate=False)),
        (buffers, model.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in named:
            if (known := names.setdefault(id(tensor), name)) != name:
                aliases[name] = known
                continue
            size = tensor.untyped_storage().nbytes()
            slots[name] = Slot(
                offset=planner.place(size),
                size_bytes=size,
                shape=tuple(tensor.shape),
                stride=tuple(tensor.stride()),
                storage_offset=tensor.storage_offset(),
                dtype=str(tensor.dtype).removeprefix("torch."),
            )
            tensors[name] = tensor
    return Manifest(size_bytes=planner.size_bytes, parameters=parameters, buffers=buffers, aliases=aliases), tensors


def install(model: Any, manifest: Manifest, arena: Any) -> None:
    """Put parameters over the arena, and clones of the buffers, in the places of a meta-device model."""
    modules = dict(model.named_modules(remove_duplicate=False))
    installed: dict[str, Any] = {}

    def put(name: str, tensor: Any) -> None:
        owner_name, _, leaf = name.rpartition(".")
        owner = modules.get(owner_name)
        if owner is None:
            raise ValueError(f"the shared weights hold {name}, for which this model has no place")
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        persistent = leaf not in owner._non_persistent_buffers_set
        owner._parameters.pop(leaf, None)
        owner._buffers.pop(leaf, None)
        if is_parameter:
            owner.register_parameter(leaf, tensor)
        else:
            owner.register_buffer(leaf, tensor, persistent=persistent)
        installed[name] = tensor

    for name, slot in manifest.parameters.items():
        put(name, torch.nn.Parameter(view(arena, slot), requires_grad=False))
    for name, slot in manifest.buffers.items():
        put(name, view(arena, slot).clone())
    for name, stored in manifest.aliases.items():
        put(name, installed[stored])


def materialize_empty(model: Any) -> list[str]:
    """Replace meta tensors without elements (the KV cache's placeholders are such), and name those that have some.

    Looks at parameters, buffers, and tensors that modules keep as plain attributes.
    """
    left: list[str] = []
    for module_name, module in model.named_modules():
        for kind in (module._parameters, module._buffers, module.__dict__):
            for leaf, value in list(kind.items()):
                if not (isinstance(value, torch.Tensor) and value.is_meta):
                    continue
                if value.numel() == 0 and kind is module.__dict__:
                    kind[leaf] = torch.empty_like(value, device="cpu")
                else:
                    left.append(f"{module_name}.{leaf}" if module_name else leaf)
    return left


def view(arena: Any, slot: Slot) -> Any:
    """The tensor of a slot."""
    flat = _storage_view(arena, slot).view(getattr(torch, slot.dtype))
    return torch.as_strided(flat, slot.shape, slot.stride, flat.storage_offset() + slot.storage_offset)


def _storage_view(arena: Any, slot: Slot) -> Any:
    return arena[slot.offset : slot.offset + slot.size_bytes]


def _storage_bytes(tensor: Any) -> Any:
    return torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())


def _as_bytes(buffer: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "not writable": so it is meant
        return torch.frombuffer(buffer, dtype=torch.uint8)
