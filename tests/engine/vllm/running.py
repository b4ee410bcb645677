"""Answers that are read beside a test, token by token."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

from tests.engine.vllm.harness import EngineProcess

PROMPTS = (
    "Once upon a time, in a small village by the sea,",
    "The three laws of motion say that",
    "A recipe for bread. Ingredients:",
)
TOKENS = 80


class Running:
    """One answer to each prompt."""

    def __init__(self, engine: EngineProcess, prompts: Sequence[str] = PROMPTS) -> None:
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.ends: list[str] = ["" for _ in prompts]
        self._engine = engine
        self._prompts = prompts
        self._came = threading.Condition()
        self._threads = [threading.Thread(target=self._read, args=(at,)) for at in range(len(prompts))]
        for thread in self._threads:
            thread.start()

    def _read(self, at: int) -> None:
        body = {
            "model": "smollm2",
            "prompt": self._prompts[at],
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        body |= {"stream": True, "return_token_ids": True}
        with self._engine.client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                choice: dict[str, Any] = json.loads(line.removeprefix("data: "))["choices"][0]
                with self._came:
                    self.tokens[at] += choice["token_ids"]
                    self.ends[at] = choice["finish_reason"] or ""
                    self._came.notify_all()

    def until_each_has(self, count: int) -> None:
        with self._came:
            assert self._came.wait_for(lambda: min(map(len, self.tokens)) >= count, timeout=60)

    def wait(self) -> list[list[int]]:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        assert self.ends == ["length"] * len(self._prompts)
        return self.tokens
