"""Import what an engine will need, and start nothing: for a parent process that forks engines.

The imports take ten times as long as the start itself. No thread may exist afterwards: a fork would copy the locks it
holds and not the thread that would release them.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from workers.engine import EngineConfigError, EngineDeadError
from workers.engines.vllm import arguments, build, compat, plugin, shims
from workers.engines.vllm.start_failure import one_line
from workers.settings import EngineSettings

logger = logging.getLogger(__name__)

_MODULES: Final = (
    "transformers",
    "transformers.file_utils",
    "anyio._backends._asyncio",
    "uvicorn",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
    "httpx",
    "xgrammar",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.entrypoints.generate.api_router",
    "vllm.entrypoints.launchers.api_server.app_state",
    "vllm.entrypoints.launchers.api_server.routers",
    "vllm.entrypoints.launchers.app",
    "vllm.entrypoints.pooling.factories",
    "vllm.entrypoints.scale_out.factories",
    "vllm.entrypoints.serve",
    "vllm.entrypoints.serve.utils.fingerprint",
    "vllm.entrypoints.speech_to_text.factories",
    "vllm.model_executor.layers.fused_moe.eep_reconfigure",
    "vllm.model_executor.layers.fused_moe.oracle.int8",
    "vllm.model_executor.layers.fused_moe.oracle.mxfp8",
    "vllm.model_executor.layers.fused_moe.oracle.nvfp4",
    "vllm.model_executor.layers.quantization.compressed_tensors.utils",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.pool.flash_maxsim.flash_maxsim_rerank",
    "vllm.v1.structured_output",
    "workers.engines.vllm.core",
    "workers.engines.vllm.executor",
    "workers.engines.vllm.loader",
    "workers.engines.vllm.replay",
    "workers.engines.vllm.serving",
)
"""What a start would import on its way; a test looks at what it still adds."""
_CPU_MODULES: Final = (
    "vllm.triton_utils.dispatcher",
    "vllm.utils.cpu_triton_utils",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.worker.cpu_worker",
    "workers.engines.vllm.cpu_worker",
)
_GPU_MODULES: Final = (
    "vllm.v1.worker.gpu_worker",
    "workers.engines.vllm.cuda_worker",
)
"""Attention and other kernels for a GPU are chosen by looking at it, and imported then."""


def import_all(device: str) -> None:
    """Environment, vLLM, plugin, and the check of every seam.

    Raises:
        EngineConfigError: no vLLM here, or one that does not fit.
    """
    build.check_device(device)
    if build.on_gpu(device):
        logger.warning("vLLM's engines on a GPU were not run on hardware yet: docs/gpu.md says how they were tested")
    compat.prepare_environment(device)
    if logging.getLogger().getEffectiveLevel() > logging.DEBUG:
        logging.getLogger("vllm").setLevel(logging.WARNING)  # its INFO is sixty lines a start
    with _root_logger_kept():
        shims.replace_random_uuid()
        for module in (*_MODULES, *(_GPU_MODULES if build.on_gpu(device) else _CPU_MODULES)):
            importlib.import_module(module)
    shims.replace_clocks()
    compat.check_seams(device)
    plugin.register()


@contextmanager
def _root_logger_kept() -> Iterator[None]:
    """Some library that vLLM imports sets the root logger's level to its own taste; that would silence us."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


def preload(settings: EngineSettings) -> None:
    """Everything up to the point where threads begin: modules, model class, tokenizer, arguments, the app's schemas.

    A bad model folder or argument is not judged here: the engine that is forked later says so, in its own life.

    Raises:
        EngineConfigError: no vLLM here, or one that does not fit.
        RuntimeError: something started a thread, so that a fork is not safe.
    """
    started = time.monotonic()
    import_all(settings.device)
    try:
        with _root_logger_kept():
            _rehearse(settings)
    except (EngineConfigError, EngineDeadError) as error:
        logger.debug("preloading without the model: %s", error)
    compat.die_of_faults()
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"preloading vLLM left {threads} threads in a process that is going to fork")
    logger.debug("preloaded in %.1f s", time.monotonic() - started)


def _rehearse(settings: EngineSettings) -> None:
    from vllm.entrypoints.launchers.app import build_app
    from vllm.renderers.hf import resolve_chat_template_content_format
    from vllm.tokenizers import cached_tokenizer_from_config

    folder = arguments.model_folder(settings)
    arguments.register_model_class(list(arguments.read_model_config(folder).get("architectures") or ()))
    namespace = arguments.parse(settings, folder)
    config = arguments.create_config(namespace, None, device=settings.device)
    try:
        build_app(namespace, ("generate",), config.model_config)
        # vLLM keeps tokenizers and what it found out about chat templates: the engines find both in its caches.
        tokenizer = cached_tokenizer_from_config(config.model_config)
        if getattr(tokenizer, "chat_template", None):
            resolve_chat_template_content_format(None, None, "auto", tokenizer, model_config=config.model_config)
            tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    except Exception as error:
        raise EngineConfigError(f"cannot rehearse a start: {one_line(error)}") from error
