"""[P] What cannot be resumed exactly, or is not known to be, and the word that notes say for it.

A word here means: streams of it go on to carry notes, which say ``x=`` and the word, and a resume of it is a 409. The
list is short on purpose, and each entry is a row in docs/resume.md.
"""

from __future__ import annotations

from typing import Any


def engine_reason(config: Any) -> str:
    """Why no answer of an engine with this VllmConfig can be resumed; empty if they can."""
    if config.use_v2_model_runner:
        return "v2_runner"
    if config.speculative_config is not None:
        return "speculative_decoding"
    if config.kv_transfer_config is not None or config.ec_transfer_config is not None:
        return "kv_connector"
    if config.aux_output_config.enabled or config.model_config.return_sampling_mask:
        return "sampling_details"
    return ""


def request_reason(prompt: Any, params: Any, *, lora: bool, seeds_resume: bool) -> str:
    """Why this request cannot be resumed; empty if it can. ``prompt`` and ``params`` as vLLM's ``generate`` takes them;
    ``seeds_resume``: whether this engine can bring a request's generator to where it was."""
    if not isinstance(prompt, dict) or prompt.get("type") != "token":
        return "multimodal"
    if lora:
        return "adapter"
    if params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None:
        return "prompt_logprobs"
    if params.logprobs == -1 or params.logprob_token_ids is not None or params.flat_logprobs:
        return "logprobs_of_all"
    if params.seed is not None and params.temperature and not seeds_resume:
        return "seed"
    if getattr(params, "thinking_token_budget", None) is not None:
        return "thinking_budget"
    extra = params.extra_args or {}
    if "kv_transfer_params" in extra or "ec_transfer_params" in extra:
        return "kv_connector"
    return ""
