"""The embedded model as transformers loads it: it must answer, and its tokenizer must be SmolLM2's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from workers.engines.vllm.smollm2 import embedded_model_dir, ensure_embedded_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = ensure_embedded_model(tmp_path_factory.mktemp("models") / "smollm2")
    assert embedded_model_dir(made) == made
    return made


def test_tokenizer_splits_digits_and_round_trips(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    text = "a b's  12 é 你好 \n\t x"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("<|im_end|>").input_ids == [tokenizer.eos_token_id] == [2]


def test_it_knows_the_capital_of_france(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=16)
    assert "Paris" in tokenizer.decode(answer[0][prompt["input_ids"].shape[1] :])
