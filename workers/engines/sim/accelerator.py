"""[P] How long the steps of a simulated accelerator take: continuous batching with chunked prefill, as a sum of parts.

A step makes one token for every sequence that decodes, and computes one chunk of the prompts that are in their prefill,
shared by them in order of arrival. It takes a constant part, a part for each sequence, a part for each token of context
that decoding reads, and what the chunk takes at the rate of a prefill that has the accelerator to itself:

    step = step_seconds + sequences x sequence_seconds + context x context_token_seconds + chunk / prefill rate

So prefills and decodes take turns: where prompts come in, everybody's tokens come more slowly, and what is to be
prefilled waits for what was there before. Other things that matter for a real one (kernels that fit some sizes better
than others, the longer attention of a prompt's end, speculation) are left out.
"""

from __future__ import annotations

import msgspec


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """Durations are seconds."""

    prefill_tokens_per_second: float
    step_seconds: float
    sequence_seconds: float
    context_token_seconds: float
    chunk_tokens: int
    """Most tokens of prompts in one step."""
    kv_tokens: int
    """How many tokens the KV cache has room for; 0: no limit."""

    def seconds(self, *, sequences: int, context_tokens: int, prefill_tokens: int) -> float:
        """What a step takes that decodes so many sequences, of so many tokens in all, and computes so many of
        prompts."""
        return (
            self.step_seconds
            + sequences * self.sequence_seconds
            + context_tokens * self.context_token_seconds
            + prefill_tokens / self.prefill_tokens_per_second
        )


class Work(msgspec.Struct, kw_only=True):
    """What was done, and how well the simulated times were held."""

    steps: int = 0
    wanted_seconds: float = 0.0
    """What the steps were to take."""
    took_seconds: float = 0.0
    """What they took: more, if the machine is too slow to be so fast."""
    latest_seconds: float = 0.0
    """By how much the end of a step was late at most."""
    prefilled_tokens: int = 0
    prefilled_again_tokens: int = 0
    """Of these, those of requests that had some of their answer already: resumed, or preempted."""
    cached_tokens: int = 0
    """What was not prefilled, since the prefix cache had it."""

    def timed(self, *, wanted: float, took: float, late: float) -> None:
        """A step is over."""
        self.steps += 1
        self.wanted_seconds += wanted
        self.took_seconds += took
        self.latest_seconds = max(self.latest_seconds, late)
