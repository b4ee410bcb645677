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
from hashlib import sha256
from importlib import metadata
from importlib.metadata import Distribution, DistributionFinder
from types import CodeType
from typing import Any, Final

from workers.engine import EngineConfigError
from workers.engines.vllm import build, shims
from workers.engines.vllm.build import CPU_DISTRIBUTION, DISTRIBUTION

VLLM_VERSION: Final = "0.32"
"""The minor version the seams below were read in."""

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
}
_CPU_DEFAULTS: Final = {
    # Some samplers are decorated with torch.compile even in eager mode: the first request that asks for logprobs would
    # run a C++ compiler for many seconds, and leave its output in the temp folder.
    "TORCH_COMPILE_DISABLE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
_GPU_DEFAULTS: Final = {
    # Its answers could not be resumed (``resumable``).
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
_UNSET: Final = (
    # Overrides --kv-cache-memory-bytes, so that the pair's KV caches would not match the settings.
    "VLLM_CPU_KVCACHE_SPACE",
    # Would let two attempts of one request meet under one name in the core, which ends with the core.
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",
    # Puts a key in front of every route; the gateway does not pass the client's on.
    "VLLM_API_KEY",
    # Would take the KV cache's size from a file of an earlier start.
    "VLLM_ENABLE_STARTUP_PLAN",
)

_FAULTS: Final = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)

SEAMS: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    ("vllm.engine.arg_utils", "AsyncEngineArgs.from_cli_args", ()),
    ("vllm.engine.arg_utils", "AsyncEngineArgs.create_engine_config", ()),
    ("vllm.entrypoints.launchers.api_server.app_state", "init_app_state", ("engine_client", "state", "args")),
    ("vllm.entrypoints.launchers.app", "build_app", ("args", "supported_tasks", "model_config")),
    ("vllm.entrypoints.launchers.cli_args", "make_arg_parser", ()),
    ("vllm.entrypoints.launchers.cli_args", "validate_parsed_serve_args", ()),
    ("vllm.distributed.parallel_state", "init_model_parallel_group", ("use_message_queue_broadcaster",)),
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
    ("vllm.v1.core.block_pool", "BlockPool._insert_block_hash", ("block_hash_with_group_id", "block", "num_tokens")),
    ("vllm.v1.core.block_pool", "BlockPool._remove_cached_block_hashes", ("block",)),
    ("vllm.v1.core.block_pool", "BlockPool.cache_full_blocks", ("request",)),
    ("vllm.v1.core.block_pool", "BlockPool.free_blocks", ("ordered_blocks",)),
    ("vllm.v1.core.block_pool", "BlockPool.reset_prefix_cache", ()),
    ("vllm.v1.core.block_pool", "BlockPool.touch", ("blocks",)),
    ("vllm.v1.core.kv_cache_utils", "BlockHashWithGroupId", ()),
    ("vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue.append", ("block",)),
    ("vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue.remove", ("block",)),
    ("vllm.v1.core.kv_cache_utils", "init_none_hash", ("hash_fn",)),
    ("vllm.v1.core.sched.interface", "PauseState.UNPAUSED", ()),
    ("vllm.v1.core.sched.scheduler", "Scheduler.get_kv_cache_usage", ()),
    ("vllm.v1.core.sched.scheduler", "Scheduler.reset_prefix_cache", ("reset_running_requests",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output", ("scheduler_output",)),
    ("vllm.v1.engine.async_llm", "AsyncLLM.from_vllm_config", ("client_addresses", "disable_log_stats")),
    ("vllm.v1.engine.async_llm", "AsyncLLM._run_output_handler", ()),
    ("vllm.v1.engine.async_llm", "AsyncLLM.errored", ()),
    ("vllm.v1.engine.core", "EngineCoreProc._handle_client_request", ("request_type", "request")),
    ("vllm.v1.engine.core", "EngineCoreProc._perform_handshakes", ()),
    ("vllm.v1.engine.core", "EngineCoreProc._process_engine_step", ()),
    ("vllm.v1.engine.core", "EngineCoreProc._reset_caches", ()),
    ("vllm.v1.engine.core", "EngineCoreProc._send_engine_dead", ()),
    ("vllm.v1.engine.core", "EngineCoreProc.pause_scheduler", ("mode", "clear_cache")),
    ("vllm.v1.engine.core", "EngineCoreProc.resume_scheduler", ()),
    ("vllm.v1.engine.core", "EngineCoreProc.run_busy_loop", ()),
    ("vllm.v1.engine.core", "EngineShutdownState.REQUESTED", ()),
    ("vllm.v1.engine.utils", "EngineZmqAddresses", ("inputs", "outputs")),
    ("vllm.v1.executor.uniproc_executor", "UniProcExecutor._distributed_args", ()),
    ("vllm.v1.executor.uniproc_executor", "UniProcExecutor._init_executor", ()),
    (
        "vllm.v1.executor.uniproc_executor",
        "UniProcExecutor.collective_rpc",
        ("method", "timeout", "args", "kwargs", "non_block", "single_value"),
    ),
    ("vllm.v1.outputs", "AsyncModelRunnerOutput.get_output", ()),
    ("vllm.v1.outputs", "ModelRunnerOutput", ("sampled_token_ids",)),
    ("vllm.v1.serial_utils", "run_method", ("obj", "method", "args", "kwargs")),
    ("vllm.v1.worker.worker_base", "WorkerWrapperBase", ("rpc_rank",)),
    ("vllm.v1.worker.worker_base", "WorkerWrapperBase.init_worker", ("all_kwargs",)),
    (
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._dummy_run",
        ("num_tokens", "force_attention", "uniform_decode", "skip_eplb"),
    ),
    ("vllm.v1.kv_cache_interface", "FullAttentionSpec", ("block_size",)),
    ("vllm.v1.worker.gpu_worker", "Worker.determine_available_memory", ()),
    ("vllm.v1.worker.gpu_worker", "Worker._maybe_get_memory_pool_context", ("tag",)),
    ("vllm.v1.worker.utils", "allocate_kv_cache", ("kv_cache_config", "device")),
    ("vllm.v1.worker.worker_base", "WorkerBase.synchronize_device", ()),
)
"""(module, attribute, parameters it must take) that we call, override or replace."""

RESUME_SEAMS: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    ("vllm.exceptions", "GenerationError", ("message",)),
    ("vllm.exceptions", "MaxQueuedTokensError", ()),
    ("vllm.exceptions", "QueueOverflowError", ()),
    ("vllm.outputs", "RequestOutput.add", ("next_output", "aggregate")),
    ("vllm.sampling_params", "RequestOutputKind.DELTA", ()),
    ("vllm.sampling_params", "RequestOutputKind.FINAL_ONLY", ()),
    ("vllm.sampling_params", "SamplingParams", ("extra_args", "flat_logprobs", "logprob_token_ids", "prompt_logprobs")),
    ("vllm.sampling_params", "SamplingParams.num_logprobs", ()),
    ("vllm.utils", "random_uuid", ()),
    ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler.add_request", ("request",)),
    ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler._handle_blocked_waiting_request", ("request",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler.add_request", ("request",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler._handle_blocked_waiting_request", ("request",)),
    ("vllm.v1.core.sched.utils", "check_stop", ("request", "max_model_len")),
    (
        "vllm.v1.engine",
        "EngineCoreOutput",
        ("request_id", "new_token_ids", "new_logprobs", "finish_reason", "stop_reason"),
    ),
    ("vllm.v1.engine", "EngineCoreRequest.params", ()),
    ("vllm.v1.engine.async_llm", "AsyncLLM.abort", ("request_id", "internal")),
    ("vllm.v1.engine.async_llm", "AsyncLLM.check_admission", ("n", "request_id")),
    ("vllm.v1.engine.async_llm", "AsyncLLM.add_request", ("request_id", "prompt", "params")),
    ("vllm.v1.engine.async_llm", "AsyncLLM.generate", ("prompt", "sampling_params", "request_id", "lora_request")),
    ("vllm.v1.engine.core_client", "AsyncMPClient.add_request_async", ("request",)),
    ("vllm.v1.engine.output_processor", "OutputProcessor.process_outputs", ("engine_core_outputs",)),
    ("vllm.v1.engine.output_processor", "RequestOutputCollector.get_nowait", ()),
    ("vllm.v1.engine.output_processor", "RequestState.from_new_request", ("queue",)),
    ("vllm.v1.outputs", "LogprobsLists", ("logprob_token_ids", "logprobs", "sampled_token_ranks")),
    ("vllm.v1.request", "Request.append_output_token_ids", ("token_ids",)),
    ("vllm.v1.request", "Request.take_prefill_stats", ()),
    ("vllm.v1.request", "Request.use_structured_output", ()),
    ("vllm.v1.request", "RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", ()),
    ("vllm.v1.request", "RequestStatus.get_finished_reason", ("status",)),
    ("vllm.v1.structured_output", "StructuredOutputManager.accept_tokens", ("request", "new_token_ids")),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._update_states", ("scheduler_output",)),
    ("vllm.v1.worker.gpu_input_batch", "CachedRequestState", ("req_id", "generator", "output_token_ids")),
    ("vllm.v1.worker.gpu_input_batch", "InputBatch.add_request", ("request",)),
    *((module, "time", ()) for module in shims.TIMED),
    *((module, "uuid", ()) for module in shims.IDENTIFIED),
)
"""The same for what a resume relies on. Without one of these an engine could not keep the promise, so it does not start
either."""

CPU_SEAMS: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    ("vllm._custom_ops", "CPUDNNLGEMMHandler", ()),
    ("vllm._custom_ops", "_supports_onednn", ()),
    ("vllm._custom_ops", "create_onednn_mm", ("weight", "primitive_cache_size")),
    ("vllm._custom_ops", "onednn_mm", ("dnnl_handler", "x", "bias")),
    ("vllm.model_executor.layers.utils", "check_cpu_sgl_kernel", ("n", "k", "dtype")),
    ("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", ("layer", "remove_weight")),
    ("vllm.v1.sample.ops.topk_topp_sampler", "TopKTopPSampler.forward_cpu", ("generators",)),
    ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner._bookkeeping_sync", ()),
    ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner._sample", ()),
    ("vllm.v1.worker.cpu_worker", "CPUWorker.init_device", ()),
)
"""The same, only on a CPU. vLLM's modules for it replace parts of ``torch.cuda``: where there is a GPU nothing of
theirs may be imported."""

CPU_CLOSURES: Final = (("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", "handler"),)
"""(module, function, variable): a function that is made in there holds the variable, and we take it from there
(``packed``)."""

GPU_SEAMS: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    ("vllm.envs", "VLLM_USE_V2_MODEL_RUNNER", ()),
    ("vllm.model_executor.layers.quantization.base_config", "QuantizeMethodBase.supports_pre_processed_weights", ()),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", ("vllm_config", "device")),
    (
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner.initialize_kv_cache",
        ("kv_cache_config", "kv_cache_allocation_context"),
    ),
    ("vllm.v1.worker.gpu_worker", "Worker._make_model_runner", ()),
    ("vllm.v1.worker.gpu_worker", "Worker.compile_or_warm_up_model", ()),
    ("vllm.v1.worker.gpu_worker", "Worker.initialize_from_config", ("kv_cache_config",)),
    ("vllm.v1.worker.gpu_worker", "Worker.wake_up", ("tags",)),
    ("vllm.v1.worker.utils", "request_memory", ("init_snapshot", "cache_config")),
)
"""The same, only on a GPU. They can be looked up in any build."""


def prepare_environment(device: str) -> None:
    """Set what vLLM, OpenMP and the tokenizers read from the environment when they are imported.

    Must come before the first import of vllm or torch; ``vllm`` reads most variables once, libgomp when it is loaded.
    """
    os.environ.update(_ENVIRONMENT)
    for name, value in (_DEFAULTS | (_GPU_DEFAULTS if build.on_gpu(device) else _CPU_DEFAULTS)).items():
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


def pin_hash_seed(algorithm: str, instance: str) -> None:
    """Let all engines of a pod give a prefix the same name. Before the core is built.

    Cryptographic hashes have a fixed seed in vLLM. Others get a random one for each process, so that nobody can prepare
    prompts whose names collide; here it follows from the pod's life, which is drawn at random too. The variable is the
    one that vLLM reads; Python itself has read it already.
    """
    if algorithm.startswith("xxhash"):
        seed = int.from_bytes(sha256(f"hotspare prefix names {instance}".encode()).digest()[:4], "little")
        os.environ.setdefault("PYTHONHASHSEED", str(seed))


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


def check_seams(device: str) -> None:
    """Look up every seam that an engine on ``device`` has.

    Raises:
        EngineConfigError: names the installed version and what is missing or changed in it.
    """
    seams = (*SEAMS, *RESUME_SEAMS, *(GPU_SEAMS if build.on_gpu(device) else CPU_SEAMS))
    broken = [problem for seam in seams if (problem := _problem(*seam))]
    closures = () if build.on_gpu(device) else CPU_CLOSURES
    broken += [problem for closure in closures if (problem := _closure_problem(*closure))]
    broken += [f"{module} makes its ids in another way" for module in shims.unbound()]
    if broken:
        raise EngineConfigError(
            f"this engine was built for vLLM {VLLM_VERSION} and does not fit {DISTRIBUTION} "
            f"{metadata.version(DISTRIBUTION)}: {'; '.join(broken)}"
        )


def _closure_problem(module: str, function: str, variable: str) -> str | None:
    """Whether a function made within another one holds a variable of it. One that is not there at all is a seam's to
    say."""
    try:
        code = getattr(importlib.import_module(module), function).__code__
    except (ImportError, AttributeError):
        return None
    made = (part for part in code.co_consts if isinstance(part, CodeType))
    if any(variable in part.co_freevars for part in made):
        return None
    return f"{module}.{function} makes no function that holds its {variable}"


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
