"""TensorRT-LLM behind ``workers.engine.Engine``: its ``AsyncLLM``, and the application of its own OpenAI server.

What is used of it: ``tensorrt_llm.llmapi.AsyncLLM`` (``setup_async``, ``release``, ``resume``, ``shutdown``, and
``_check_health``, which its own server asks, too) and ``tensorrt_llm.serve.OpenAIServer`` (``app``). ``AsyncLLM`` runs
its workers under Ray, which must be installed; that is where it publishes the release of memory.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from workers.engine import ASGIApp, EngineConfigError
from workers.engines.outside import OutsideEngine, published

KV_TAG: Final = "kv_cache"
_OURS: Final = ("model", "max_seq_len", "max_batch_size", "dtype")


class TrtllmEngine(OutsideEngine):
    """Implements ``workers.engine.Engine``. ``engine_args`` are arguments of ``AsyncLLM`` as ``--name=value``, the
    value in JSON or a plain word."""

    title = "TensorRT-LLM"

    def start(self) -> Any:
        interface = published("tensorrt_llm", _interface, title=self.title)
        arguments = _arguments(self._settings.engine_args)
        try:
            return interface.llm(
                model=str(self._model),
                max_seq_len=self._settings.max_model_len,
                max_batch_size=self._settings.capacity,
                dtype=self._settings.dtype,
                **arguments,
            )
        except (TypeError, ValueError) as error:
            raise EngineConfigError(f"TensorRT-LLM cannot serve this model with these settings: {error}") from error

    async def ready(self, engine: Any) -> ASGIApp:
        interface = published("tensorrt_llm", _interface, title=self.title)
        await engine.setup_async()
        name = self._settings.served_model_name or self._model.resolve().name
        server = interface.server(
            generator=engine, model=name, tool_parser=None, server_role=None, metadata_server_cfg=None
        )
        app: ASGIApp = server.app
        return app

    async def abort(self, engine: Any) -> None:
        """Its server aborts what a cancelled request was waiting for; there is no call that ends all."""

    async def release_kv(self, engine: Any) -> None:
        await engine.release([KV_TAG])

    async def resume_kv(self, engine: Any) -> None:
        await engine.resume([KV_TAG])

    def problem(self, engine: Any) -> str:
        return "" if engine._check_health() else "its executor says that it is not well"

    def stop(self, engine: Any) -> None:
        engine.shutdown()


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """What is used of TensorRT-LLM, imported."""

    llm: Any
    server: Any


def _interface() -> Interface:
    from tensorrt_llm.llmapi import AsyncLLM
    from tensorrt_llm.serve import OpenAIServer

    for name in ("setup_async", "release", "resume", "shutdown", "_check_health"):
        getattr(AsyncLLM, name)
    return Interface(llm=AsyncLLM, server=OpenAIServer)


def _arguments(given: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for argument in given:
        name, equals, value = argument.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not argument.startswith("--") or not name.isidentifier():
            raise EngineConfigError(f"TensorRT-LLM takes engine_args as --name=value: {argument!r} is none")
        if name in _OURS:
            raise EngineConfigError(f"engine_args must not hold {name}: this engine sets it from its own settings")
        found[name] = _value(value) if equals else True
    return found


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
