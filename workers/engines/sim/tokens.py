"""The sim's vocabulary, tokenizer and "model": everything that decides which text a prompt gives.

Token ids 0 to 255 are single bytes; then come the words as they stand at the beginning of a text, then the same words
with a space before them. Only words are generated, so that answers are readable; bytes are for prompts. Decoding is
plain concatenation and encoding loses nothing.

The next token is a pure function of the weights, the prompt and its index. The weights are a pattern made from the
seed, so a test knows the text without an engine (``expected_text``), while an engine reads it from its mapping: a wrong
mapping gives wrong words.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b, shake_128
from typing import Final, Protocol

WORDS: Final = tuple(
    """
    the of and to in is it that was for on are as with his they at be this from have or by one had not but what all
    were when we there can an your which their said if do will each about how up out them then she many some so these
    would other into has more her two like him see time could no make than first been its who now people my made over
    did down only way find use may water long little very after words called just where most know get through back
    much before go good new write our used me man too any day same right look think also around another came come
    work three word must because does part even place well such here take why things help put years different away
    again off went old number great tell men say small every found still between name should home big give air line
    set own under read last never us left end along while might next sound below saw something thought both few those
    always looked show large often together asked house world going want school important until form food keep
    children feet land side without boy once animals life enough took sometimes four head above kind began almost live
    page got earth need far hand high year mother light parts country father let night following picture being study
    second eyes soon times story boys since white days ever paper hard near sentence better best across during today
    others however sure means knew try told young miles sun ways thing whole hear example heard several change answer
    room sea against top turned learn point city play toward five using himself usually money seen car morning bird
    river garden window stone bridge winter summer yellow green silver quiet gentle bright early letter music engine
    shadow spare wheel island forest mountain valley harbour lantern copper glass candle market kitchen ladder basket
    café naïve façade Zürich niño über œuvre smörgås Ελλάδα мир 東京 🌱
    """.split()  # noqa: SIM905 - four hundred quoted words are no easier to read
)

BYTE_TOKENS: Final = 256
_FIRST: Final = BYTE_TOKENS
_SPACED: Final = BYTE_TOKENS + len(WORDS)
VOCAB_SIZE: Final = BYTE_TOKENS + 2 * len(WORDS)

PIECES: Final = (
    *(bytes([value]) for value in range(BYTE_TOKENS)),
    *(word.encode() for word in WORDS),
    *(b" " + word.encode() for word in WORDS),
)
"""Token id → its bytes."""

_IDS: Final = {piece.decode(): index for index, piece in enumerate(PIECES) if index >= BYTE_TOKENS}
_SPLIT: Final = re.compile(r" ?\S+|\s")

PAGE_BYTES: Final = 4096
_PAGE_WORDS: Final = PAGE_BYTES // 8
_TILE_BYTES: Final = 1 << 20

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


class Words(Protocol):
    """The weights as 64-bit words: a mapping cast to them, or the pattern itself."""

    def __getitem__(self, index: int, /) -> int: ...

    def __len__(self) -> int: ...


def encode(text: str) -> list[int]:
    """Token ids of ``text``: known words are one token, everything else is its UTF-8 bytes."""
    ids: list[int] = []
    for piece in _SPLIT.findall(text):
        known = _IDS.get(piece)
        if known is None:
            ids.extend(piece.encode("utf-8", "surrogatepass"))
        else:
            ids.append(known)
    return ids


def decode(ids: Iterable[int]) -> str:
    """The text of ``ids``; bytes that are not UTF-8 become U+FFFD.

    Raises:
        IndexError: an id is not in the vocabulary.
    """
    return b"".join(PIECES[index] for index in ids).decode("utf-8", "replace")


def render_chat(messages: Iterable[tuple[str, str]]) -> str:
    """The chat template: (role, content) pairs as one prompt that asks for the assistant's turn."""
    turns = [f"<|{role}|>\n{content}\n" for role, content in messages]
    return "".join((*turns, "<|assistant|>\n"))


def prompt_digest(prompt: Sequence[int]) -> int:
    """64 bits that stand for the prompt."""
    return int.from_bytes(blake2b(array("I", prompt).tobytes(), digest_size=8).digest(), "little")


def _mix(value: int) -> int:
    """Spread 64 bits over 64 bits (the finalizer of splitmix64)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def token_at(weights: Words, digest: int, index: int) -> int:
    """The token that follows ``index`` generated ones. Reads one word of the weights."""
    where = _mix((digest + index * _GOLDEN) & _MASK)
    choice = _mix(weights[where % len(weights)] ^ where) % len(WORDS)
    return (_SPACED if index else _FIRST) + choice


def page_aligned(size_bytes: int) -> int:
    """``size_bytes`` rounded up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


class WeightsPattern:
    """What the sim's weights hold: a tile made from the seed, again and again, each page starting with its number.

    The page numbers make pages that changed places show; the tile makes gigabytes cheap to write.
    """

    def __init__(self, *, seed: int, size_bytes: int) -> None:
        self.size_bytes = page_aligned(size_bytes)
        name = f"hotspare sim weights {seed}".encode()
        self._tile = array("Q", shake_128(name).digest(_TILE_BYTES))

    def __len__(self) -> int:
        return self.size_bytes // 8

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(index)
        page, within = divmod(index, _PAGE_WORDS)
        return page if within == 0 else self._tile[index % len(self._tile)]

    def fill(self, target: memoryview) -> None:
        """Write the pattern into ``target``, a writable view of 64-bit words of exactly this size.

        Raises:
            ValueError: the view has another size.
        """
        if len(target) != len(self):
            raise ValueError(f"the weights are {len(self)} words and the target holds {len(target)}")
        tile = memoryview(self._tile)
        for start in range(0, len(target), len(tile)):
            part = target[start : start + len(tile)]
            part[:] = tile[: len(part)]
        for page in range(self.size_bytes // PAGE_BYTES):
            target[page * _PAGE_WORDS] = page


def expected_tokens(prompt: Sequence[int], count: int, *, seed: int = 0, weights_bytes: int = 8 << 20) -> list[int]:
    """The first ``count`` tokens an engine with these settings gives for ``prompt``, computed without an engine."""
    weights = WeightsPattern(seed=seed, size_bytes=weights_bytes)
    digest = prompt_digest(prompt)
    return [token_at(weights, digest, index) for index in range(count)]


def expected_text(prompt: str, count: int, *, seed: int = 0, weights_bytes: int = 8 << 20) -> str:
    """The text of the first ``count`` tokens for a completion of ``prompt``.

    For a chat, pass ``render_chat(...)`` as the prompt.
    """
    return decode(expected_tokens(encode(prompt), count, seed=seed, weights_bytes=weights_bytes))
