"""SGLang behind ``workers.engine.Engine``: its ``Engine`` object, its OpenAI serving classes, its memory release.

What is used of it: ``sglang.srt.entrypoints.engine.Engine`` (``tokenizer_manager``, ``template_manager``,
``get_all_child_pids``, ``shutdown``), ``prepare_server_args``, of the tokenizer manager the memory calls,
``abort_request``, ``rid_to_state`` and ``last_receive_tstamp``, and ``OpenAIServingChat`` and
``OpenAIServingCompletion`` with their request classes. Memory is released through ``torch_memory_saver``, which
``--enable-memory-saver`` switches on.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from pathlib import Path
from typing import Any, Final

import msgspec

from workers.engine import ASGIApp, EngineConfigError
from workers.engines.outside import OutsideEngine, published
from workers.engines.sglang.serving import build
from workers.settings import EngineSettings

KV_TAG: Final = "kv_cache"
_IDLE_POLL_SECONDS: Final = 0.01
_OURS: Final = ("--model-path", "--model", "--served-model-name", "--host", "--port", "--enable-memory-saver")


class SglangEngine(OutsideEngine):
    """Implements ``workers.engine.Engine``. The scheduler and the detokenizer are processes of SGLang's own."""

    title = "SGLang"
    _came = 0.0
    _progress = 0

    def start(self) -> Any:
        interface = published("sglang", _interface, title=self.title)
        arguments = _server_args(self._settings, self._model, interface)
        try:
            return interface.engine(server_args=arguments)
        except (ValueError, AssertionError) as error:
            raise EngineConfigError(f"SGLang cannot serve this model with these settings: {error}") from error

    async def ready(self, engine: Any) -> ASGIApp:
        interface = published("sglang", _interface, title=self.title)
        return build(engine, interface, name=self._settings.served_model_name or self._model.resolve().name)

    async def abort(self, engine: Any) -> None:
        manager = engine.tokenizer_manager
        manager.abort_request(abort_all=True)
        while manager.rid_to_state:  # noqa: ASYNC110 - SGLang tells nobody; memory may be released when it is idle only
            await asyncio.sleep(_IDLE_POLL_SECONDS)

    async def release_kv(self, engine: Any) -> None:
        interface = published("sglang", _interface, title=self.title)
        await engine.tokenizer_manager.release_memory_occupation(interface.release(tags=[KV_TAG]), None)

    async def resume_kv(self, engine: Any) -> None:
        interface = published("sglang", _interface, title=self.title)
        await engine.tokenizer_manager.resume_memory_occupation(interface.resume(tags=[KV_TAG]), None)

    def progress(self, engine: Any) -> int:
        """How often its outputs were seen to have come: their time is what SGLang's own health check looks at."""
        if (came := engine.tokenizer_manager.last_receive_tstamp) != self._came:
            self._came = came
            self._progress += 1
        return self._progress

    def problem(self, engine: Any) -> str:
        for pid in engine.get_all_child_pids():
            if not _lives(pid):
                return f"its process {pid} has ended"
        return ""

    def stop(self, engine: Any) -> None:
        engine.shutdown()


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """What is used of SGLang, imported."""

    engine: Any
    prepare_server_args: Any
    release: Any
    resume: Any
    chat: Any
    chat_request: Any
    completion: Any
    completion_request: Any


def _interface() -> Interface:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput
    from sglang.srt.server_args import prepare_server_args

    for name in ("get_all_child_pids", "shutdown"):
        getattr(Engine, name)
    return Interface(
        engine=Engine,
        prepare_server_args=prepare_server_args,
        release=ReleaseMemoryOccupationReqInput,
        resume=ResumeMemoryOccupationReqInput,
        chat=OpenAIServingChat,
        chat_request=ChatCompletionRequest,
        completion=OpenAIServingCompletion,
        completion_request=CompletionRequest,
    )


def _server_args(settings: EngineSettings, model: Path, interface: Interface) -> Any:
    for argument in settings.engine_args:
        if (flag := argument.partition("=")[0].replace("_", "-")) in _OURS:
            raise EngineConfigError(f"engine_args must not hold {flag}: this engine sets it from its own settings")
    argv = [
        f"--model-path={model}",
        f"--served-model-name={settings.served_model_name or model.resolve().name}",
        f"--context-length={settings.max_model_len}",
        f"--max-running-requests={settings.capacity}",
        f"--dtype={settings.dtype}",
        "--enable-memory-saver",
        *settings.engine_args,
    ]
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return interface.prepare_server_args(argv)
    except SystemExit:
        sentence = complaint.getvalue().strip().rpartition("error: ")[2] or "it only asked for help"
        raise EngineConfigError(f"SGLang does not take these engine_args: {sentence}") from None
    except (TypeError, ValueError, AssertionError) as error:
        raise EngineConfigError(f"SGLang does not take these engine_args: {error}") from None


def _lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
