"""The core's side of a resume: a request that enters with output tokens, as if it had been preempted after them.

Its tokens travel in the sampling parameters' ``extra_args``, which reach scheduler and model runner unchanged. The
scheduler counts them as output (length, block hashes, grammar) and the request waits as any other; its prefill then
goes over prompt and output, as after a preemption. Clients cannot send them: ``replay.ReplayingLLM`` takes the key out
of what they sent.

Written for V1 model runners (what is a device's own stands beside its worker, ``cpu_worker``), and for both schedulers,
though vLLM lets steps overlap on no CPU. The V2 runner is given prompt and output by its scheduler and draws from seed
and position, so it would need nothing of the runner's; it has not been run here, and its answers are marked as not to
be resumed (``resumable``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from workers.engines.vllm.carried import JournallingScheduler

logger = logging.getLogger(__name__)

RESUMED: Final = "hotspare_resumed"
"""In ``SamplingParams.extra_args``: the tokens that were generated elsewhere, in order."""


def resumed_tokens(params: Any) -> list[int]:
    """What a request enters with; empty for nearly all."""
    extra = params.extra_args if params is not None else None
    return extra.get(RESUMED, []) if extra else []


class _Resumed:
    """Mixed into both of vLLM's schedulers."""

    def add_request(self, request: Any) -> None:
        if (tokens := resumed_tokens(request.sampling_params)) and request.request_id not in self.requests:  # type: ignore[attr-defined]
            # It says how much of the *prompt* was cached, which is told already; and a hit beyond the prompt, the
            # normal case where the cache outlived the other engine, would be an assertion, and this engine's end.
            request.prefill_stats = None
            if not request.use_structured_output:
                request.append_output_token_ids(list(tokens))
        super().add_request(request)  # type: ignore[misc]

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """A request with a grammar gets its tokens when the grammar is there, one by one as they were generated."""
        waits = request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        if not super()._handle_blocked_waiting_request(request):  # type: ignore[misc]
            return False
        if waits and (tokens := resumed_tokens(request.sampling_params)) and not self._accept(request, tokens):
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            self.grammar_compile_error_reqs.add(request.request_id)  # type: ignore[attr-defined]
            return False
        return True

    def _accept(self, request: Any, tokens: Sequence[int]) -> bool:
        try:
            for token in tokens:
                request.append_output_token_ids(token)
                if not self.structured_output_manager.accept_tokens(request, [token]):  # type: ignore[attr-defined]
                    return False
        except Exception:  # of a grammar's library: this request's end, and not that of all others in this thread
            logger.exception("the tokens of a resumed request could not be given to its grammar")
            return False
        return True


class ResumedScheduler(_Resumed, JournallingScheduler, Scheduler):
    """vLLM's scheduler, with resumed requests, and with a prefix cache that can be carried over."""


class ResumedAsyncScheduler(_Resumed, AsyncScheduler):
    """vLLM's scheduler of overlapping steps, with resumed requests."""


class ResumedBatch:
    """Mixed into vLLM's V1 runners: requests that enter with output tokens."""

    def _update_states(self, scheduler_output: Any) -> Any:
        """New requests bring their prompt only: their output is added before they get into the batch, where penalties,
        ``min_tokens`` and ``bad_words`` look at it."""
        new = {
            request.req_id: tokens
            for request in scheduler_output.scheduled_new_reqs
            if (tokens := resumed_tokens(request.sampling_params))
        }
        if not new:
            return super()._update_states(scheduler_output)  # type: ignore[misc]
        batch = self.input_batch  # type: ignore[attr-defined]
        add_request = batch.add_request

        def add(state: Any) -> Any:
            if tokens := new.pop(state.req_id, None):
                state.output_token_ids.extend(tokens)
                if state.generator is not None:
                    self._advance(state.generator, len(tokens))
            return add_request(state)

        batch.add_request = add
        try:
            return super()._update_states(scheduler_output)  # type: ignore[misc]
        finally:
            del batch.add_request

    def _advance(self, generator: torch.Generator, draws: int) -> None:
        """Bring a request's generator to where ``draws`` tokens take it. Where that is not known its requests are not
        resumed (``hotspare_seeds_resume``), and none comes here."""
