"""What vLLM calls to learn of us (entry point ``vllm.general_plugins``): the load format ``gms``."""

from __future__ import annotations

from workers.engines.vllm.arguments import LOAD_FORMAT


def register() -> None:
    """Register the loader. Idempotent: vLLM runs plugins in each of its processes, and we call it ourselves too."""
    from vllm.model_executor import model_loader

    from workers.engines.vllm.loader import GmsModelLoader

    if model_loader._LOAD_FORMAT_TO_MODEL_LOADER.get(LOAD_FORMAT) is not GmsModelLoader:
        model_loader.register_model_loader(LOAD_FORMAT)(GmsModelLoader)
