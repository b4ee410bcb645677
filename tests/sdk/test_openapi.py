"""Generated requests against gateway and sim pods: whatever is sent, no 5xx, and each answer is one that
``/openapi.json`` describes, errors in their envelope."""

from __future__ import annotations

from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.sdk.conftest import MODEL

pytestmark = [pytest.mark.sdk, pytest.mark.process, pytest.mark.timeout(120)]

CHECKS: Any = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = 6
"""Of each operation and mode: about ten seconds for both."""


def tamed(name: str, value: Any) -> Any:
    """A model that exists, and no answer of thousands of tokens."""
    if name == "model" and isinstance(value, str):
        return MODEL
    if name.startswith("max_") and isinstance(value, int):
        return min(value, 8)
    return value


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_generated_requests(base_url: str, mode: GenerationMode) -> None:
    document = requests.get(f"{base_url}/openapi.json", timeout=10).json()
    schema = schemathesis.openapi.from_dict(document)
    statuses: dict[int, int] = {}
    with requests.Session() as session:
        session.trust_env = False
        for found in schema.get_all_operations():
            operation = found.ok()
            if mode is GenerationMode.NEGATIVE and not operation.body:
                continue

            @seed(20251130)
            @settings(
                max_examples=EXAMPLES,
                phases=(Phase.generate,),
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def run(case: Case) -> None:
                if isinstance(case.body, dict):
                    case.body |= {name: tamed(name, value) for name, value in case.body.items()}
                response = case.call(base_url=base_url, session=session, timeout=20)
                statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
                case.validate_response(response, checks=CHECKS)

            run()
    assert statuses.get(400, 0) > EXAMPLES, statuses
    if mode is GenerationMode.POSITIVE:  # it is no use if all of it is refused
        assert statuses.get(200, 0) > 5 * EXAMPLES, statuses
