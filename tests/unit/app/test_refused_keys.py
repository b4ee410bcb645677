from __future__ import annotations

from app.security.refused_keys import RefusedKeys


def test_a_line_a_second_with_what_came_since_the_last() -> None:
    keys = RefusedKeys()
    assert [keys.refused(now=100 + at) for at in (0, 0.1, 0.9, 1.0, 1.5, 9.0)] == [1, 0, 0, 3, 0, 2]
