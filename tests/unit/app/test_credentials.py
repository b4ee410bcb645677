from __future__ import annotations

import pytest

from app.openai.errors import GatewayError, Header
from app.security.credentials import ApiKeys, parse_key_file, parse_keys, shown_keys, subprotocol_keys

SALT = bytes(range(32))


def test_keys_of_a_list() -> None:
    assert parse_keys("") == ()
    assert parse_keys("a, b ,,a,c=") == ("a", "b", "c=")


def test_keys_of_a_file() -> None:
    assert parse_key_file("# of team one\nalpha\n\n  beta  \r\n#gamma\nalpha\n") == ("alpha", "beta")
    assert parse_key_file("") == ()


@pytest.mark.parametrize("bad", ["se cret", "se\x7fcret", "schlüssel", "s" * 513])
def test_what_is_no_key_is_named_by_its_place_only(bad: str) -> None:
    for parse, text, place in ((parse_keys, f"good,{bad}", "key 2"), (parse_key_file, f"good\n\n{bad}\n", "line 3")):
        with pytest.raises(ValueError, match=f"{place} is not a key") as caught:
            parse(text)
        assert bad not in str(caught.value)


def test_too_many_keys() -> None:
    with pytest.raises(ValueError, match="1001 keys"):
        parse_keys(",".join(map(str, range(1001))))


@pytest.mark.parametrize(
    ("headers", "keys"),
    [
        ([], []),
        ([(b"authorization", b"Bearer k")], [b"k"]),
        ([(b"authorization", b"bEARER   k ")], [b"k"]),
        ([(b"authorization", b"Bearer")], []),
        ([(b"authorization", b"Bearer ")], []),
        ([(b"authorization", b"Basic Bearer k")], []),
        ([(b"authorization", b"k")], []),
        ([(b"x-api-key", b"k")], [b"k"]),
        ([(b"x-api-key", b"k2"), (b"authorization", b"Bearer k1")], [b"k1", b"k2"]),
        ([(b"authorization", b"Bearer k1"), (b"authorization", b"Bearer k2")], [b"k1"]),
        ([(b"x-api-key", b"k1"), (b"x-api-key", b"k2")], [b"k1"]),
        ([(b"api-key", b"k"), (b"cookie", b"k")], []),
    ],
)
def test_what_a_request_shows(headers: list[Header], keys: list[bytes]) -> None:
    assert shown_keys(headers) == keys


@pytest.mark.parametrize(
    ("value", "keys"),
    [
        (b"realtime", []),
        (b"realtime, openai-insecure-api-key.k-1, openai-beta.realtime-v1", [b"k-1"]),
        (b"openai-insecure-api-key.", []),
        (b"openai-insecure-api-key.a,openai-insecure-api-key.b", [b"a"]),
    ],
)
def test_a_key_among_subprotocols(value: bytes, keys: list[bytes]) -> None:
    assert subprotocol_keys([(b"sec-websocket-protocol", value)]) == keys


def test_known_and_unknown_keys() -> None:
    keys = ApiKeys(["alpha", "beta", "gamma"], salt=SALT)
    assert all(keys.knows(key) for key in (b"alpha", b"beta", b"gamma"))
    assert not any(keys.knows(key) for key in (b"", b"alph", b"alphaa", b"Alpha", b"\xff", b"k" * 100_000))
    keys.replace(["delta"])
    assert (len(keys), keys.knows(b"delta"), keys.knows(b"alpha")) == (1, True, False)
    keys.replace([])
    assert not keys.knows(b"delta")


def test_every_key_is_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    """No early exit: the number of comparisons says nothing."""
    import app.security.credentials as module

    compared: list[bool] = []
    real = module.compare_digest

    def counting(a: bytes, b: bytes) -> bool:
        compared.append(real(a, b))
        return compared[-1]

    keys = ApiKeys(["alpha", "beta", "gamma"], salt=SALT)
    monkeypatch.setattr(module, "compare_digest", counting)
    for key in (b"alpha", b"gamma", b"none"):
        compared.clear()
        keys.knows(key)
        assert len(compared) == 3


def test_no_key_is_kept_as_it_is() -> None:
    keys = ApiKeys(["alpha-key"], salt=SALT)
    assert not any("alpha" in repr(getattr(keys, name)) for name in ApiKeys.__slots__)


def nobody() -> str:
    raise AssertionError("nobody asked for a client's address")


def test_refusals() -> None:
    keys = ApiKeys(["alpha"], salt=SALT)
    keys.check([(b"x-api-key", b"wrong"), (b"authorization", b"Bearer alpha")], nobody)
    keys.check_websocket([(b"sec-websocket-protocol", b"realtime, openai-insecure-api-key.alpha")], nobody)
    for headers, said in (([], "needs an API key"), ([(b"x-api-key", b"my-wrong-key")], "not one that")):
        with pytest.raises(GatewayError, match=said) as caught:
            keys.check(headers, lambda: "192.0.2.7")
        error = caught.value
        assert (error.status, error.code, error.fault, error.retryable) == (401, "invalid_api_key", "client", False)
        assert (b"www-authenticate", b"Bearer") in error.headers
        assert b"my-wrong-key" not in error.body
    with pytest.raises(GatewayError):  # over HTTP a subprotocol is nothing
        keys.check([(b"sec-websocket-protocol", b"openai-insecure-api-key.alpha")], lambda: "192.0.2.7")


def test_who_shows_a_wrong_key_is_told() -> None:
    told: list[str] = []
    keys = ApiKeys(["alpha"], salt=SALT, on_unknown=told.append)
    for headers in ([], [(b"x-api-key", b"wrong")]):
        with pytest.raises(GatewayError):
            keys.check(headers, lambda: "192.0.2.7")
    with pytest.raises(GatewayError):
        keys.check_websocket([(b"sec-websocket-protocol", b"openai-insecure-api-key.a")], lambda: "::1")
    assert told == ["192.0.2.7", "::1"]
