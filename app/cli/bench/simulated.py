"""Sim engines whose every answer is known: the settings for a fleet of them, and what they say."""

from __future__ import annotations

from typing import Final

from app.cli.bench.chaos.answers import MODEL_LENGTH, SimAnswers

SEED: Final = 7
WEIGHTS_BYTES: Final = 8 << 20
TOKEN_SECONDS: Final = 0.02


def settings() -> dict[str, str]:
    """What the answers depend on is set here, whatever the environment of the command says."""
    return {
        "HOTSPARE_SIM_SEED": str(SEED),
        "HOTSPARE_SIM_WEIGHTS_BYTES": str(WEIGHTS_BYTES),
        "HOTSPARE_SIM_MAX_MODEL_LEN": str(MODEL_LENGTH),
        "HOTSPARE_SIM_TOKEN_SECONDS": str(TOKEN_SECONDS),
        "HOTSPARE_SIM_POISON_TEXT": "",
    }


def answers(model: str) -> SimAnswers:
    """Of engines with these settings."""
    return SimAnswers(model=model, seed=SEED, weights_bytes=WEIGHTS_BYTES)
