"""A step that no request asked for, to see that this engine still computes what it computed when it started.

vLLM's own dummy run: one token of fixed input through all layers, with attention, and no slot of the KV cache to write
to. Over scratch memory that is zeros what it gives is the same each time, bit for bit: the same kernels run over the
same weights. The first run of an engine's life is the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook


class _GivenUp(Exception):
    """The dummy run was told to stop."""


class Trial:
    """One engine's dummy runs."""

    def __init__(self) -> None:
        self._reference: bytes | None = None

    def run(self, runner: Any, stop: Callable[[], bool]) -> str | None:
        """One of them: what is wrong with the numbers, or None. Given up between two modules of the model once
        ``stop``: a promotion waits for it then."""

        def look(_module: Any, _inputs: Any) -> None:
            if stop():
                raise _GivenUp

        _begin_anew(runner)
        hook = register_module_forward_pre_hook(look)
        try:
            hidden, _ = runner._dummy_run(1, force_attention=True, uniform_decode=True, skip_eplb=True)
        except _GivenUp:
            return None
        finally:
            hook.remove()
        if hidden.numel() == 0:
            return None  # a model of which vLLM makes no dummy run
        row = hidden[:1].detach().to("cpu", torch.float32).contiguous()
        if not bool(torch.isfinite(row).all()):
            return "a step over scratch memory gave numbers that are not finite"
        digest = blake2b(row.numpy().tobytes(), digest_size=16).digest()
        self._reference = self._reference or digest
        if digest != self._reference:
            return "a step over scratch memory gave other numbers than it did when the engine started"
        return None


@torch.inference_mode()
def _begin_anew(runner: Any) -> None:
    """vLLM's V1 runner takes for a dummy run's input what the step before left in its buffers: after an engine has been
    active, the last token of somebody's answer, and its place. The V2 runner has no such."""
    if hasattr(runner, "input_ids"):
        runner.input_ids.gpu[:1].zero_()
        runner.positions[:1].zero_()
        if runner.uses_mrope:
            runner.mrope_positions.gpu[:, :1].zero_()
