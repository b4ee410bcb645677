"""Parts of the vLLM engine's resume that need no vLLM: logprobs as text, and what cannot be resumed."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engines.vllm.logprob_text import Position, pack, unpack
from workers.engines.vllm.resumable import engine_reason, request_reason


def as_vllm_keeps_it(position: Position) -> dict[int, Any]:
    """A dictionary: a token that is there twice is there once, with its place among the most likely as its rank."""
    ranks = [position.rank, *range(1, len(position.ids))]
    return {
        token: SimpleNamespace(logprob=logprob, rank=rank)
        for token, logprob, rank in zip(position.ids, position.logprobs, ranks, strict=True)
    }


def single(value: float) -> float:
    """As a float32."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


@st.composite
def positions(draw: st.DrawFn, top: int) -> Position:
    """What a sampler gives for one token."""
    likely = draw(st.lists(st.integers(0, 2**31), min_size=top, max_size=top, unique=True))
    values = [single(value) for value in draw(st.lists(st.floats(-1e6, 0), min_size=top, max_size=top))]
    if top and draw(st.booleans()):
        rank = draw(st.integers(1, top))
        return Position([likely[rank - 1], *likely], [values[rank - 1], *values], rank)
    sampled = draw(st.integers(0, 2**31).filter(lambda token: token not in likely))
    return Position([sampled, *likely], [float("-inf"), *values], draw(st.integers(top + 1, 60_000)))


@given(st.data(), st.integers(0, 5))
def test_logprobs_come_back_as_the_sampler_gave_them(data: st.DataObject, top: int) -> None:
    given_ones = data.draw(st.lists(positions(top), max_size=4))
    text = pack(map(as_vllm_keeps_it, given_ones))
    assert not set(text) & set("=| \n")
    assert unpack(text, top) == given_ones


@pytest.mark.parametrize(
    "text",
    [
        "!",
        "AAAA",
        pack([{5: SimpleNamespace(logprob=-1.0, rank=9)}])[:-2],
        pack([{n: SimpleNamespace(logprob=-1.0, rank=1) for n in range(5)}]),
        pack([{n: SimpleNamespace(logprob=-1.0, rank=3) for n in range(2)}]),
        pack([{5: SimpleNamespace(logprob=-1.0, rank=0)}]),
    ],
    ids=["no_base64", "short", "cut", "too_many", "rank_beyond", "no_rank"],
)
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="note"):
        unpack(text, 2)


CONFIG = {
    "use_v2_model_runner": False,
    "speculative_config": None,
    "kv_transfer_config": None,
    "ec_transfer_config": None,
    "aux_output_config": SimpleNamespace(enabled=False),
    "model_config": SimpleNamespace(return_sampling_mask=False),
}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"use_v2_model_runner": True}, "v2_runner"),
        ({"speculative_config": object()}, "speculative_decoding"),
        ({"kv_transfer_config": object()}, "kv_connector"),
        ({"ec_transfer_config": object()}, "kv_connector"),
        ({"aux_output_config": SimpleNamespace(enabled=True)}, "sampling_details"),
        ({"model_config": SimpleNamespace(return_sampling_mask=True)}, "sampling_details"),
    ],
)
def test_engines_whose_answers_are_not_resumed(changes: dict[str, Any], reason: str) -> None:
    assert engine_reason(SimpleNamespace(**{**CONFIG, **changes})) == reason


PARAMS = {
    "prompt_logprobs": None,
    "prompt_logprob_token_ids": None,
    "logprobs": 3,
    "logprob_token_ids": None,
    "flat_logprobs": False,
    "seed": None,
    "temperature": 0.9,
    "thinking_token_budget": None,
    "extra_args": None,
}
TOKENS = {"type": "token", "prompt_token_ids": [1]}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt_logprob_token_ids": [[1]]}, "prompt_logprobs"),
        ({"logprobs": -1}, "logprobs_of_all"),
        ({"logprob_token_ids": [5]}, "logprobs_of_all"),
        ({"flat_logprobs": True}, "logprobs_of_all"),
        ({"seed": 0}, "seed"),
        ({"seed": 1, "temperature": 0.0}, ""),
        ({"thinking_token_budget": 0}, "thinking_budget"),
        ({"extra_args": {"other": 1}}, ""),
        ({"extra_args": {"kv_transfer_params": {}}}, "kv_connector"),
    ],
)
def test_requests_that_are_not_resumed(changes: dict[str, Any], reason: str) -> None:
    params = SimpleNamespace(**{**PARAMS, **changes})
    assert request_reason(TOKENS, params, lora=False, seeds_resume=False) == reason


def test_requests_of_other_kinds_are_not_resumed() -> None:
    params = SimpleNamespace(**PARAMS)
    for prompt in ("text", {"type": "multimodal"}, {"type": "embeds"}, object()):
        assert request_reason(prompt, params, lora=False, seeds_resume=True) == "multimodal"
    assert request_reason(TOKENS, params, lora=True, seeds_resume=True) == "adapter"
    seeded = SimpleNamespace(**{**PARAMS, "seed": 1})
    assert request_reason(TOKENS, seeded, lora=False, seeds_resume=True) == ""
