from __future__ import annotations

import pytest

from gms.protocol import ErrorCode, GmsError
from workers.life import is_hopeless

OF_SETTINGS = {
    ErrorCode.OUT_OF_MEMORY,
    ErrorCode.SIZE_MISMATCH,
    ErrorCode.VERSION_MISMATCH,
    ErrorCode.WRONG_DEVICE,
}


@pytest.mark.parametrize("code", ErrorCode)
def test_only_what_settings_must_change_is_hopeless(code: ErrorCode) -> None:
    assert is_hopeless(GmsError(code, "")) is (code in OF_SETTINGS)
    assert not is_hopeless(GmsError(code, "", retryable=True))
