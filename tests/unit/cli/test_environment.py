"""A HOTSPARE_ variable that nobody reads is a mistake, and is said to be one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields

import pytest
from pydantic_settings import BaseSettings

from app.cli.environment import refuse_unknown
from app.cli.errors import CliError
from app.cli.plan import PER_PROCESS, UpOptions
from app.cli.variables import KNOWN, PREFIX, meant
from app.settings import GatewaySettings
from gms.settings import GmsSettings
from workers.settings import EngineSettings, PodSettings, SimSettings

SETTINGS = (GatewaySettings, EngineSettings, PodSettings, SimSettings, GmsSettings)
OTHERS = {"HOTSPARE_API_KEY", "HOTSPARE_MODEL_CACHE", "HOTSPARE_PARENT_PID"}
"""Read without a settings class."""


def names_of(settings: type[BaseSettings]) -> Iterator[str]:
    """The variables that fill the fields of ``settings``, aliases included."""
    prefix = str(settings.model_config.get("env_prefix", ""))
    for field, info in settings.model_fields.items():
        if isinstance(info.annotation, type) and hasattr(info.annotation, "model_fields"):
            continue  # settings of their own, with names of their own
        alias = info.validation_alias
        if alias is None or settings.model_config.get("populate_by_name"):
            yield f"{prefix}{field}".upper()
        for name in [alias] if isinstance(alias, str) else getattr(alias, "choices", ()):
            if isinstance(name, str):
                yield name.upper()


def test_the_table_is_what_the_settings_classes_say() -> None:
    expected = {name for settings in SETTINGS for name in names_of(settings) if name.startswith(PREFIX)}
    expected |= {f"{PREFIX}{field.name.upper()}" for field in fields(UpOptions)} | OTHERS
    assert expected - KNOWN == set(), "missing in app/cli/variables.py"
    assert KNOWN - expected == set(), "read by nobody any more: remove them from app/cli/variables.py"
    assert PER_PROCESS <= KNOWN


def test_looking_costs_no_settings_class() -> None:
    script = "import sys, app.cli.environment as e; e.refuse_unknown({'HOTSPARE_PORT': '1'}); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"pydantic", "pydantic_settings", "difflib", "asyncio", "msgspec"} & set(modules)


@pytest.mark.parametrize("name", ["HOTSPARE_PODS", "HOTSPARE_MODEL_CACHE", "HOTSPARE_INSTANCE", "HOTSPARE_GMS_SOCKET"])
def test_every_process_has_its_names(name: str) -> None:
    refuse_unknown({name: "1"})


def test_other_programs_variables_are_their_own() -> None:
    refuse_unknown({"PATH": "/bin", "HOTSPAREX": "1", "XHOTSPARE_PODS": "1"})


def test_case_does_not_matter_as_for_the_settings() -> None:
    refuse_unknown({"hotspare_sim_seed": "1"})


def test_what_kubernetes_makes_of_services_is_no_setting() -> None:
    refuse_unknown(
        {
            "HOTSPARE_GATEWAY_SERVICE_HOST": "10.0.0.1",
            "HOTSPARE_GATEWAY_SERVICE_PORT": "8000",
            "HOTSPARE_GATEWAY_SERVICE_PORT_HTTP": "8000",
            "HOTSPARE_GATEWAY_PORT": "tcp://10.0.0.1:8000",
            "HOTSPARE_GATEWAY_PORT_8000_TCP_ADDR": "10.0.0.1",
            "HOTSPARE_SERVICE_HOST": "10.0.0.1",
        }
    )
    with pytest.raises(CliError, match="HOTSPARE_GATEWAY_PORT is unknown"):
        refuse_unknown({"HOTSPARE_GATEWAY_PORT": "8000"})


def test_a_typing_mistake_is_named_with_the_nearest_name() -> None:
    with pytest.raises(CliError, match=r"HOTSPARE_SIM_TFTT_SECONDS is unknown.*HOTSPARE_SIM_TTFT_SECONDS\?") as caught:
        refuse_unknown({"HOTSPARE_SIM_TFTT_SECONDS": "1"})
    assert caught.value.code == 2


def test_every_name_that_may_have_been_meant_is_named() -> None:
    """The nearest one by its letters lets clients wait between requests, the other one sends comments."""
    both = r"did you mean HOTSPARE_KEEP_ALIVE_SECONDS or HOTSPARE_SSE_KEEPALIVE_SECONDS\?"
    with pytest.raises(CliError, match=both):
        refuse_unknown({"HOTSPARE_KEEPALIVE_SECONDS": "1"})


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("MAX_INFLIGT", ["MAX_INFLIGHT"]),
        ("HANDSHAKE_TIMEOUT_SECONDS", ["TLS_HANDSHAKE_TIMEOUT_SECONDS"]),
        ("MODEL_LEN", ["MAX_MODEL_LEN", "SIM_MAX_MODEL_LEN"]),
        ("STALL_TIMEOUT_SECOND", ["STALL_TIMEOUT_SECONDS"]),
        ("SECONDS", []),
        ("QQQQ", []),
    ],
)
def test_what_may_have_been_meant(name: str, names: list[str]) -> None:
    assert meant(name, {other.removeprefix(PREFIX) for other in KNOWN}) == names


def test_flags_have_dashes() -> None:
    assert meant("keepalive-seconds", ["keep-alive-seconds", "sse-keepalive-seconds", "port"]) == [
        "keep-alive-seconds",
        "sse-keepalive-seconds",
    ]


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(CliError, match=r"HOTSPARE_QQQQQQQ is unknown.*unset it.*; .*HOTSPARE_XXXXXXX is unknown"):
        refuse_unknown({"HOTSPARE_XXXXXXX": "", "HOTSPARE_QQQQQQQ": ""})


def test_what_up_gives_to_each_process_is_never_suggested() -> None:
    with pytest.raises(CliError, match=r"did you mean HOTSPARE_PODS\?"):
        refuse_unknown({"HOTSPARE_PODZ": "2"}, not_suggested=PER_PROCESS)


def test_what_others_call_a_setting_leads_to_it() -> None:
    with pytest.raises(CliError, match=r"HOTSPARE_MIGRATION_LIMIT is unknown.*did you mean HOTSPARE_RESUME_LIMIT\?"):
        refuse_unknown({"HOTSPARE_MIGRATION_LIMIT": "3"})
