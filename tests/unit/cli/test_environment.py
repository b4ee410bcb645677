"""A HOTSPARE_ variable that nobody reads is a mistake, and is said to be one."""

from __future__ import annotations

import pytest

from app.cli.environment import known_names, refuse_unknown
from app.cli.errors import CliError


@pytest.mark.parametrize(
    "name",
    [
        "HOTSPARE_PODS",
        "HOTSPARE_BASE_PORT",
        "HOTSPARE_RUN_DIR",
        "HOTSPARE_PARENT_PID",
        "HOTSPARE_MAX_INFLIGHT",
        "HOTSPARE_DRAIN_TIMEOUT_SECONDS",
        "HOTSPARE_GRACE_PERIOD_SECONDS",
        "HOTSPARE_KV_CACHE_BYTES",
        "HOTSPARE_SIM_TTFT_SECONDS",
        "HOTSPARE_GMS_MEMORY_LIMIT",
        "HOTSPARE_INSTANCE",
        "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS",
    ],
)
def test_every_process_has_its_names(name: str) -> None:
    assert name in known_names()
    refuse_unknown({name: "1"})


def test_other_programs_variables_are_their_own() -> None:
    refuse_unknown({"PATH": "/bin", "HOTSPAREX": "1", "XHOTSPARE_PODS": "1"})


def test_case_does_not_matter_as_for_the_settings() -> None:
    refuse_unknown({"hotspare_sim_seed": "1"})


def test_a_typing_mistake_is_named_with_the_nearest_name() -> None:
    with pytest.raises(CliError, match=r"HOTSPARE_SIM_TFTT_SECONDS is unknown.*HOTSPARE_SIM_TTFT_SECONDS\?") as caught:
        refuse_unknown({"HOTSPARE_SIM_TFTT_SECONDS": "1"})
    assert caught.value.code == 2


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(CliError, match=r"HOTSPARE_QQQQQQQ is unknown.*unset it.*; .*HOTSPARE_XXXXXXX is unknown"):
        refuse_unknown({"HOTSPARE_XXXXXXX": "", "HOTSPARE_QQQQQQQ": ""})


def test_what_up_gives_to_each_process_is_never_suggested() -> None:
    with pytest.raises(CliError, match=r"did you mean HOTSPARE_PODS\?"):
        refuse_unknown({"HOTSPARE_PODZ": "2"})
