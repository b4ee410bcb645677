"""From our settings to vLLM's arguments, and from there to its config; every mistake becomes one sentence."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import logging
from pathlib import Path
from typing import Any, Final

import msgspec

from workers.engine import EngineConfigError
from workers.memory import MemoryService
from workers.settings import EngineSettings

logger = logging.getLogger(__name__)

EMBEDDED_MODEL_NAME: Final = "smollm2"
ADDITIONAL_CONFIG_KEY: Final = "hotspare"
LOAD_FORMAT: Final = "gms"
GMS_WORKER: Final = "workers.engines.vllm.worker.GmsCpuWorker"
PRIVATE_WORKER: Final = "workers.engines.vllm.worker.PrivateMemoryWorker"

_OURS: Final = frozenset(
    {
        "--additional-config",
        "--api-key",
        "--host",
        "--load-format",
        "--model",
        "--model-loader-extra-config",
        "--port",
        "--served-model-name",
        "--tensor-parallel-size",
        "--pipeline-parallel-size",
        "--data-parallel-size",
        "--worker-cls",
    }
)
"""Arguments that follow from our own settings, or that this engine does not do (more than one rank)."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """What loader and worker must know beyond vLLM's own config; travels inside it as plain JSON."""

    runtime_dir: str
    service: MemoryService | None = None

    def to_config(self) -> dict[str, Any]:
        """As vLLM's ``additional_config`` and ``model_loader_extra_config`` carry it."""
        return {ADDITIONAL_CONFIG_KEY: msgspec.to_builtins(self)}

    @classmethod
    def from_config(cls, config: Any) -> Placement:
        """Raises:
        ValueError: the config does not come from this engine.
        """
        try:
            return msgspec.convert(dict(config)[ADDITIONAL_CONFIG_KEY], cls)
        except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
            raise ValueError(
                "load format 'gms' and its worker are for engines started by `hotspare engine`, "
                "which says where the memory service is"
            ) from error


def model_folder(settings: EngineSettings) -> Path:
    """The folder to load from, checked.

    Raises:
        EngineConfigError: not a folder with a readable model in it.
    """
    if settings.model is None:
        from workers.engines.vllm.smollm2 import ensure_embedded_model

        folder: Path = ensure_embedded_model()
        return folder
    read_model_config(settings.model)
    return settings.model


def read_model_config(folder: Path) -> dict[str, Any]:
    """The model's ``config.json``.

    Raises:
        EngineConfigError: says what is wrong with the folder.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise EngineConfigError(f"there is no model folder {folder}")
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise EngineConfigError(f"{folder} is not a model folder: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise EngineConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(config, dict):
        raise EngineConfigError(f"cannot read {path}: it holds no JSON object")
    return config


def served_model_name(settings: EngineSettings) -> str:
    """The name that clients use."""
    if settings.served_model_name:
        return settings.served_model_name
    return settings.model.resolve().name if settings.model is not None else EMBEDDED_MODEL_NAME


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
    argv = [
        f"--model={folder}",
        f"--served-model-name={served_model_name(settings)}",
        f"--max-model-len={settings.max_model_len}",
        f"--dtype={settings.dtype}",
        f"--kv-cache-memory-bytes={settings.kv_cache_bytes}",
        f"--max-num-seqs={settings.capacity}",  # the gate lets no more in, and buffers are sized by it
        "--enforce-eager",
        "--disable-log-stats",
        "--disable-fastapi-docs",
        *settings.engine_args,
    ]
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


def create_config(namespace: argparse.Namespace, placement: Placement) -> Any:
    """The VllmConfig of this engine.

    Raises:
        EngineConfigError: vLLM refuses the combination.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    namespace.use_tqdm_on_load = False
    namespace.worker_cls = PRIVATE_WORKER
    if placement.service is not None:
        namespace.load_format = LOAD_FORMAT
        namespace.model_loader_extra_config = placement.to_config()
        namespace.worker_cls = GMS_WORKER
    namespace.additional_config = {**(namespace.additional_config or {}), **placement.to_config()}
    try:
        return AsyncEngineArgs.from_cli_args(namespace).create_engine_config()
    except Exception as error:  # it only looks at settings and files here: whatever fails, those are to be changed
        raise EngineConfigError(f"vLLM cannot serve this model with these settings: {one_line(error)}") from error


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
            raise EngineConfigError(f"vLLM's class for {architecture} cannot be imported: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """An error's text for the middle of a sentence: pydantic and vLLM like several lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if "errors.pydantic.dev" not in line]
    return " ".join(lines)[:600] or type(error).__name__
