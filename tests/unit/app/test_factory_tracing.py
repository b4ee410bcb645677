from __future__ import annotations

import subprocess
import sys

import pytest

from app.factory import create_app
from app.settings import GatewaySettings
from app.start_error import StartError


def test_traces_without_their_packages_are_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "app.telemetry.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(StartError, match=r"hotspare\[opentelemetry\]"):
        create_app(GatewaySettings(otlp_endpoint="http://127.0.0.1:1"))


def test_without_an_endpoint_nothing_of_it_is_loaded() -> None:
    code = "import sys, app.factory as f; from app.settings import GatewaySettings as S; f.create_app(S()); "
    code += "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said == "[]\n"
