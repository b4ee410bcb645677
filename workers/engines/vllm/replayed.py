"""Noted tokens as outputs of the core, for ``replay``: what the core would have said of each, and what it would not."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus

from workers.engines.vllm.logprob_text import Position, unpack
from workers.engines.vllm.resumed import RESUMED
from workers.recorder import ResumeRefusedError
from workers.resume import Resume


class Choice:
    """One of a request's choices while it is replayed; also what ``check_stop`` looks at of a request."""

    pooling_params = None

    def __init__(self, request: Any, model_config: Any) -> None:
        self.request = request
        self.sampling_params = request.sampling_params
        self.max_tokens = request.sampling_params.max_tokens
        self.output_token_ids: list[int] = []
        self.status: Any = RequestStatus.RUNNING
        self.stop_reason: int | str | None = None
        self._prompt_tokens = len(request.prompt_token_ids)
        self._max_model_len = model_config.max_model_len
        self._vocabulary = model_config.get_vocab_size()

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return self._prompt_tokens + len(self.output_token_ids)

    def take(self, token: int, states: Any, position: Position | None) -> Any:
        """The core's output with this token.

        Raises:
            ResumeRefusedError: no core of this model gives it here.
        """
        if self.request.request_id not in states:
            raise ResumeRefusedError("its notes go on after the end of a choice")
        if not 0 <= token < self._vocabulary:
            raise ResumeRefusedError(f"its notes name a token {token}")
        self.output_token_ids.append(token)
        ended = check_stop(self, self._max_model_len)
        return EngineCoreOutput(
            request_id=self.request.request_id,
            new_token_ids=[token],
            new_logprobs=None if position is None else _as_arrays(position),
            finish_reason=RequestStatus.get_finished_reason(self.status) if ended else None,
            stop_reason=self.stop_reason if ended else None,
        )

    def resumed(self) -> Any:
        """The request as it enters the core. Parameters are copied: the choices of one request may share them."""
        if self.output_token_ids:
            params = copy.copy(self.request.sampling_params)
            params.extra_args = {**(params.extra_args or {}), RESUMED: self.output_token_ids}
            self.request.sampling_params = params
        return self.request


def logprobs_of(resume: Resume, choices: Sequence[Choice]) -> list[list[Position]]:
    """The logprobs of each output's tokens; empty if the request wants none.

    Raises:
        ResumeRefusedError: it wants them, and the notes do not have exactly them.
    """
    top = choices[0].sampling_params.num_logprobs
    if top is None:
        if resume.logprobs:
            raise ResumeRefusedError("its notes have logprobs that were not asked for")
        return []
    if len(resume.logprobs) != len(resume.outputs):
        raise ResumeRefusedError("its notes lack logprobs")
    try:
        found = [unpack(text, top) for text in resume.logprobs]
    except ValueError as error:
        raise ResumeRefusedError(str(error)) from None
    for output, positions in zip(resume.outputs, found, strict=True):
        tokens = [token for _, ids in output for token in ids]
        if [position.ids[0] for position in positions] != tokens:
            raise ResumeRefusedError("its notes have logprobs of other tokens")
    return found


def _as_arrays(position: Position) -> LogprobsLists:
    return LogprobsLists(
        np.array([position.ids]), np.array([position.logprobs], dtype=np.float32), np.array([position.rank])
    )
