"""From our settings to vLLM's arguments, and from there to its config; every mistake becomes one sentence."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import logging
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import msgspec

from workers.engine import EngineConfigError, EngineDeadError
from workers.engines.vllm import build
from workers.engines.vllm.start_failure import failure_of, one_line
from workers.engines.vllm.weights import broken_weights, weight_files
from workers.memory import MemoryService
from workers.settings import EngineSettings

logger = logging.getLogger(__name__)

EMBEDDED_MODEL_NAME: Final = "smollm2"
EXTRA_CONFIG_KEY: Final = "hotspare"
LOAD_FORMAT: Final = "gms"
WORKERS: Final = {
    (False, True): "workers.engines.vllm.cpu_worker.GmsCpuWorker",
    (False, False): "workers.engines.vllm.cpu_worker.PrivateCpuWorker",
    (True, True): "workers.engines.vllm.cuda_worker.GmsCudaWorker",
    (True, False): "workers.engines.vllm.cuda_worker.PrivateCudaWorker",
}
"""By whether they are on a GPU, and whether they have a memory service."""
SCHEDULER: Final = "workers.engines.vllm.resumed.ResumedScheduler"
ASYNC_SCHEDULER: Final = "workers.engines.vllm.resumed.ResumedAsyncScheduler"

_OURS: Final = frozenset(
    {
        "--additional-config",
        "--api-key",
        "--enable-cumem-allocator",
        "--enable-sleep-mode",
        "--host",
        "--load-format",
        "--model",
        "--model-loader-extra-config",
        "--port",
        "--served-model-name",
        "--distributed-executor-backend",
        "--tensor-parallel-size",
        "--pipeline-parallel-size",
        "--data-parallel-size",
        "--scheduler-cls",
        "--worker-cls",
    }
)
"""Arguments that follow from our own settings, or that this engine does not do: pipelines, and sleeping as vLLM
does it, which would put weights and KV cache into memory of its own."""

_ON_CPU: Final = (
    "--enforce-eager",
    # An engine that takes over computes again what is beyond the last full block of each stream. vLLM's own 128 tokens
    # make that pause more than twice as long, and are no faster (docs/benchmarks.md). Its kernels want multiples of 32.
    "--block-size=32",
)
_ON_GPU: Final = (
    # The size of the KV cache is set, so vLLM uses this for nothing but to refuse a start where less is free. A shadow
    # starts on a GPU that is full by intent, perhaps while a dead engine's memory is still on its way back.
    "--gpu-memory-utilization=0.001",
    # With steps that overlap the prefix cache is not carried over (``carried``).
    "--no-async-scheduling",
)


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """What loader and worker must know beyond vLLM's own config; travels inside it as plain JSON.

    It goes where vLLM's config hash does not look: the hash ends up in every answer as ``system_fingerprint``, and the
    two engines of a pair, and pods with the same settings, must give the same.
    """

    service: MemoryService

    def to_config(self) -> dict[str, Any]:
        """As vLLM's ``model_loader_extra_config`` carries it."""
        return {EXTRA_CONFIG_KEY: msgspec.to_builtins(self)}

    @classmethod
    def from_config(cls, config: Any) -> Placement:
        """Raises:
        ValueError: the config does not come from this engine.
        """
        try:
            return msgspec.convert(dict(config)[EXTRA_CONFIG_KEY], cls)
        except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
            raise ValueError(
                "load format 'gms' and its worker are for engines started by `hotspare engine`, "
                "which says where the memory service is"
            ) from error


def model_folder(settings: EngineSettings) -> Path:
    """The folder to load from, checked.

    Raises:
        EngineConfigError: not a folder with a readable model in it, or the embedded model cannot be made of what is
            installed.
        EngineDeadError: the embedded model could not be written this time.
    """
    if settings.model is None:
        from workers.engines.vllm.smollm2 import EmbeddedModelError, ensure_embedded_model

        try:
            folder: Path = ensure_embedded_model()
        except EmbeddedModelError as error:
            raise EngineConfigError(str(error)) from error
        except OSError as error:
            raise EngineDeadError(f"the embedded model cannot be written: {error}") from error
        return folder
    read_model_config(settings.model)
    return settings.model


def read_model_config(folder: Path) -> dict[str, Any]:
    """The model's ``config.json``.

    Raises:
        EngineConfigError: says what is wrong with the folder.
        EngineDeadError: it could not be read this time.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise EngineConfigError(f"there is no model folder {folder}")
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise EngineConfigError(f"{folder} is not a model folder: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise failure_of(error, f"cannot read {path}") from None
    if not isinstance(config, dict):
        raise EngineConfigError(f"cannot read {path}: it holds no JSON object")
    return config


def served_model_name(settings: EngineSettings) -> str:
    """The name that clients use."""
    if settings.served_model_name:
        return settings.served_model_name
    return settings.model.resolve().name if settings.model is not None else EMBEDDED_MODEL_NAME


def shared_arguments(settings: EngineSettings) -> list[str]:
    """What vLLM is told whoever starts it, but for the model: also its own server, where we are compared with that."""
    return [
        f"--served-model-name={served_model_name(settings)}",
        f"--max-model-len={settings.max_model_len}",
        f"--dtype={settings.dtype}",
        f"--kv-cache-memory-bytes={settings.kv_cache_bytes}",
        f"--max-num-seqs={settings.capacity}",  # the gate lets no more in, and buffers are sized by it
        *(_ON_GPU if build.on_gpu(settings.device) else _ON_CPU),
        "--disable-log-stats",
        "--disable-fastapi-docs",
        *settings.engine_args,
    ]


def parse(settings: EngineSettings, folder: Path) -> argparse.Namespace:
    """vLLM's own argument parser over our defaults and ``engine_args``.

    Raises:
        EngineConfigError: with the parser's own sentence; it never prints usage and exits.
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for argument in settings.engine_args:
        flag = argument.partition("=")[0].replace("_", "-")
        if flag in _OURS:
            raise EngineConfigError(f"engine_args must not hold {flag}: this engine sets it from its own settings")
    argv = [f"--model={folder}", *shared_arguments(settings)]
    if settings.tensor_parallel_size > 1:
        # Named so that vLLM asks for nothing that its own executor of several ranks would need; ours is given later.
        argv += [f"--tensor-parallel-size={settings.tensor_parallel_size}", "--distributed-executor-backend=uni"]
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parser = make_arg_parser(FlexibleArgumentParser(prog="vllm", usage=""))
            namespace: argparse.Namespace = parser.parse_args(argv)
            namespace.model_tag = None
            validate_parsed_serve_args(namespace)
    except SystemExit:
        sentence = complaint.getvalue().strip().rpartition("error: ")[2] or "it only asked for help"
        raise EngineConfigError(f"vLLM does not take these engine_args: {sentence}") from None
    except (TypeError, ValueError, KeyError) as error:
        raise EngineConfigError(f"vLLM does not take these engine_args: {one_line(error)}") from None
    return namespace


def create_config(namespace: argparse.Namespace, service: MemoryService | None, *, device: str) -> Any:
    """The VllmConfig of this engine.

    Raises:
        EngineConfigError: vLLM refuses the combination.
        EngineDeadError: files could not be read this time, or there was no memory.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    namespace.use_tqdm_on_load = False
    namespace.worker_cls = WORKERS[build.on_gpu(device), service is not None]
    if service is not None:
        namespace.load_format = LOAD_FORMAT
        namespace.model_loader_extra_config = Placement(service=service).to_config()
    try:
        config = AsyncEngineArgs.from_cli_args(namespace).create_engine_config()
    except Exception as error:  # it only looks at settings and files here: what does not pass is for those to change
        # vLLM reads as many bytes of a file as its first eight say, which may be any number.
        if isinstance(error, MemoryError) and (broken := broken_weights(Path(namespace.model))) is not None:
            raise EngineConfigError(f"{broken} is no safetensors file, or a part of one") from error
        raise failure_of(error, "vLLM cannot serve this model with these settings") from error
    # Only now it is decided whether steps overlap; given before, a scheduler class would decide it.
    scheduler = config.scheduler_config
    scheduler.scheduler_cls = ASYNC_SCHEDULER if scheduler.async_scheduling else SCHEDULER
    return config


def answers_key(settings: EngineSettings, config: Any) -> bytes:
    """The same for engines that give the same answers: settings, vLLM's own config hash, and which model it is.

    Weights are told apart by the names and sizes of their files, not by content.
    """
    folder = Path(config.model_config.model)
    said = {
        "vllm": metadata.version(build.DISTRIBUTION),
        "config": config.compute_hash(),
        "model": (folder / "config.json").read_bytes(),
        "weights": [(path.name, path.stat().st_size) for path in weight_files(folder)],
        "names": served_model_name(settings),
        "max_model_len": config.model_config.max_model_len,
        "arguments": settings.engine_args,
    }
    return msgspec.msgpack.encode(said)


def register_model_class(architectures: list[str]) -> None:
    """Import the model's class here and now.

    vLLM would otherwise inspect it in a subprocess (seconds, and a cache file in the home folder), so that a parent
    process stays free of CUDA; this process is the engine itself, or forks only CPU engines.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture in architectures:
        registered = ModelRegistry.models.get(architecture)
        if registered is None or not hasattr(registered, "module_name"):
            continue  # vLLM's own error will name it, or it is a class already
        try:
            importlib.import_module(registered.module_name)
            ModelRegistry.register_model(architecture, registered.load_model_cls())
        except Exception as error:
            raise failure_of(error, f"vLLM's class for {architecture} cannot be imported") from error
