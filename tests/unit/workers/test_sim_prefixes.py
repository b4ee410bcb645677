"""The sim's prefix cache: what is found again in which slot, and what the index says of it meanwhile."""

from __future__ import annotations

from collections import deque

from workers.engines.sim.batch import Batch, SimRequest
from workers.engines.sim.prefixes import BLOCK_TOKENS, KINDS, Prefixes
from workers.kv_index import KvIndex, Shape

SLOTS = 3
PROMPT = list(range(BLOCK_TOKENS * 3 + 5))
TOKEN = b"t" * 16
SHAPE = Shape(blocks=SLOTS * KINDS, block_tokens=BLOCK_TOKENS, fingerprint=bytes(32))


def request(prompt: list[int], generated: list[int] | None = None) -> SimRequest:
    given = generated or []
    return SimRequest(digest=1, prompt_tokens=len(prompt), max_tokens=9999, generated=given, prompt=prompt)


class Pages:
    """One engine's cache over an index, and its slots."""

    def __init__(self, words: list[int], *, epoch: int) -> None:
        self.index = KvIndex(words, SHAPE)
        self.cache = Prefixes(slots=SLOTS)
        self.free = deque(reversed(range(SLOTS)))
        if epoch == 1:
            self.index.begin(token=TOKEN, epoch=1)
        assert epoch == 1 or self.index.refusal(token=TOKEN, epoch=epoch) is None
        self.taken = self.cache.attach(self.index, self.index.entries() or [], self.free)
        self.index.go_on(epoch=epoch)

    def run(self, asked: SimRequest, tokens: list[int], *, now: float = 1.0, end: bool = True) -> int:
        """What was cached of it."""
        asked.slot = self.cache.take(asked, self.free, now=now)
        for token in [*tokens, 0]:
            for place, held in list(self.cache.due(asked)):
                self.cache.clear(place)
                self.cache.publish(place, held, now=now)
            asked.tokens.append(token)
        if end:
            self.free.appendleft(asked.slot)
            self.cache.left(asked.slot, now=now)
        return asked.cached


def memory() -> list[int]:
    return [0] * (SHAPE.size_bytes // 8)


def test_a_repeated_prompt_is_found_but_for_its_last_block() -> None:
    pages = Pages(memory(), epoch=1)
    assert pages.run(request(PROMPT), []) == 0
    assert pages.run(request(PROMPT), []) == 3 * BLOCK_TOKENS
    assert pages.run(request(PROMPT[: 3 * BLOCK_TOKENS]), []) == 0, "one token must be left to compute"
    assert pages.run(request([9, *PROMPT]), []) == 0


def test_an_answer_that_is_gone_on_with_finds_what_was_generated() -> None:
    words = memory()
    generated = list(range(100, 100 + 2 * BLOCK_TOKENS))
    Pages(words, epoch=1).run(request(PROMPT), generated, end=False)
    second = Pages(words, epoch=2)
    assert second.taken == 2
    assert second.run(request(PROMPT, generated), []) == 5 * BLOCK_TOKENS


def test_a_prompt_that_goes_on_in_another_way_takes_the_old_answer_away() -> None:
    words = memory()
    pages = Pages(words, epoch=1)
    old, new = [[7 + number] * 2 * BLOCK_TOKENS for number in range(2)]
    pages.run(request(PROMPT), old)
    assert pages.run(request(PROMPT), new, end=False) == 3 * BLOCK_TOKENS
    later = Pages(words, epoch=2)
    assert later.run(request(PROMPT, old), [], end=False) <= 3 * BLOCK_TOKENS


def test_a_slot_in_use_is_nobody_elses() -> None:
    pages = Pages(memory(), epoch=1)
    pages.run(request(PROMPT), [], end=False)
    assert pages.run(request(PROMPT), []) == 0


def test_the_slot_that_was_used_longest_ago_goes_first_also_at_the_next_engine() -> None:
    words = memory()
    pages = Pages(words, epoch=1)
    prompts = [[number] * BLOCK_TOKENS * 2 for number in range(SLOTS)]
    for number, prompt in enumerate(prompts):
        pages.run(request(prompt), [], now=float(number))
    pages.run(request([*prompts[0], 5]), [], now=9.0)
    following = Pages(words, epoch=2)
    assert following.taken == SLOTS + 1 or following.taken == SLOTS
    following.run(request([50] * 40), [])
    assert following.run(request([*prompts[0], 5]), []) == 2 * BLOCK_TOKENS
    assert following.run(request([*prompts[1], 5]), []) == 0


def test_entries_of_slots_in_use_are_taken_away() -> None:
    words = memory()
    pages = Pages(words, epoch=1)
    pages.run(request(PROMPT), [])
    second = KvIndex(words, SHAPE)
    entries = second.entries() or []
    cache = Prefixes(slots=SLOTS)
    assert cache.attach(second, entries, deque([1, 2])) == 0
    assert second.entries() == []


def test_a_cached_prefill_is_as_much_shorter() -> None:
    cache = Prefixes(slots=1)
    batch = Batch(slots=1, ttft_seconds=10.0, prefixes=cache)
    first = request(PROMPT)
    batch.add(first, now=0.0)
    assert first.ready_at == 10.0
    for place, held in cache.due(first):
        cache.publish(place, held, now=0.0)
    batch.remove(first, now=10.0)
    again = request(PROMPT)
    batch.add(again, now=20.0)
    assert again.cached == 3 * BLOCK_TOKENS
    assert abs(again.ready_at - 20.0 - 10.0 * 5 / len(PROMPT)) < 1e-9


def test_a_preempted_request_names_its_prefixes_anew() -> None:
    words = memory()
    pages = Pages(words, epoch=1)
    asked = request(PROMPT)
    generated = list(range(100, 100 + 3 * BLOCK_TOKENS))
    pages.run(asked, generated)
    pages.run(request([1] * 64), [], end=False)  # the slot that was used first is another's by then
    del asked.tokens[len(generated) :]
    asked.given = len(asked.tokens)
    pages.cache.clear(asked.slot * KINDS)
    pages.run(asked, [])
    later = Pages(words, epoch=2)
    assert later.run(request(PROMPT, generated), []) == 6 * BLOCK_TOKENS
    assert later.run(request(PROMPT), []) == 3 * BLOCK_TOKENS
