"""Errors as clients see them. Pure.

Every error of the gateway is a :class:`GatewayError`: it knows its status, its OpenAI envelope, whose fault it is and
whether trying again can help. The table of codes below is the whole list; a handler picks one and adds a sentence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

Fault = Literal["client", "upstream", "internal"]
Header = tuple[bytes, bytes]

_CODES = {
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    409: "conflict",
    413: "body_too_large",
    429: "rate_limit_exceeded",
}
"""Of errors that came without one."""
_RETRY_SOON: tuple[Header, ...] = ((b"retry-after", b"1"),)


def _retry_after(seconds: float) -> tuple[Header, ...]:
    """In both forms: whole seconds, as the standard has it, and the milliseconds that OpenAI's clients prefer."""
    return ((b"retry-after", b"%d" % max(1, math.ceil(seconds))), (b"retry-after-ms", b"%d" % round(seconds * 1000)))


class GatewayError(Exception):
    """An error on its way to the client."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        type: str,
        fault: Fault,
        retryable: bool = False,
        param: str | None = None,
        headers: Sequence[Header] = (),
        refusal: str = "",
    ) -> None:
        """``refusal``: if nothing was wrong with the request, why there was no room for it, in a word."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.type = type
        self.fault = fault
        self.retryable = retryable
        self.param = param
        self.headers = tuple(headers)
        self.refusal = refusal

    @property
    def envelope(self) -> dict[str, dict[str, str | None]]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(self.envelope)


def draining() -> GatewayError:
    return GatewayError(
        503,
        "draining",
        "This gateway is shutting down and takes no new requests; try again, another one will answer.",
        type="server_error",
        fault="internal",
        retryable=True,
        headers=(*_RETRY_SOON, (b"connection", b"close")),
        refusal="draining",
    )


def drain_overran() -> GatewayError:
    return GatewayError(
        503,
        "draining",
        "This gateway is shutting down and the request did not end within its drain time.",
        type="server_error",
        fault="internal",
        retryable=True,
        headers=(*_RETRY_SOON, (b"connection", b"close")),
    )


def missing_api_key() -> GatewayError:
    return _invalid_api_key(
        "This gateway needs an API key: send it as Authorization: Bearer KEY, or as x-api-key: KEY."
    )


def unknown_api_key() -> GatewayError:
    return _invalid_api_key("The API key is not one that this gateway knows.")


def _invalid_api_key(message: str) -> GatewayError:
    return GatewayError(
        401,
        "invalid_api_key",
        message,
        type="invalid_request_error",
        fault="client",
        headers=((b"www-authenticate", b"Bearer"),),
    )


def no_worker(waited_seconds: float, model: str, *, retry_after: float = 1.0) -> GatewayError:
    served = f" that serves the model {model[:200]!r}" if model else ""
    return GatewayError(
        503,
        "no_worker",
        f"No worker{served} became ready within {waited_seconds:g} s; try again later.",
        type="server_error",
        fault="upstream",
        retryable=True,
        headers=_retry_after(retry_after),
        refusal="no_worker",
    )


def overloaded(limit: int, *, retry_after: float = 1.0) -> GatewayError:
    return GatewayError(
        429,
        "overloaded",
        f"The gateway has reached its limit of {limit} requests in flight; try again shortly.",
        type="rate_limit_error",
        fault="client",
        retryable=True,
        headers=_retry_after(retry_after),
        refusal="inflight_limit",
    )


def too_many_sessions(limit: int) -> GatewayError:
    return GatewayError(
        429,
        "overloaded",
        f"The gateway has reached its limit of {limit} realtime sessions; try again later.",
        type="rate_limit_error",
        fault="client",
        retryable=True,
        headers=(*_RETRY_SOON, (b"retry-after-ms", b"1000")),
    )


def queue_full(limit: int, model: str, *, retry_after: float) -> GatewayError:
    serving = f" that serve the model {model[:200]!r}" if model else ""
    return GatewayError(
        429,
        "overloaded",
        f"All workers{serving} are busy, and the line for them (at most {limit}) is full; try again shortly.",
        type="rate_limit_error",
        fault="client",
        retryable=True,
        headers=_retry_after(retry_after),
        refusal="queue_full",
    )


def workers_full(waited_seconds: float, model: str, *, retry_after: float) -> GatewayError:
    serving = f" that serves the model {model[:200]!r}" if model else ""
    return GatewayError(
        429,
        "overloaded",
        f"Every worker{serving} is full, and none had room within {waited_seconds:g} s; try again shortly.",
        type="rate_limit_error",
        fault="client",
        retryable=True,
        headers=_retry_after(retry_after),
        refusal="workers_full",
    )


def model_not_found(model: str) -> GatewayError:
    return GatewayError(
        404,
        "model_not_found",
        f"The model {model[:200]!r} does not exist here; GET /v1/models lists what does.",
        type="invalid_request_error",
        fault="client",
        param="model",
    )


def model_missing(path: str) -> GatewayError:
    return GatewayError(
        400,
        "missing_required_parameter",
        f"{path} needs the name of a model: {path}?model=…; GET /v1/models lists what there is.",
        type="invalid_request_error",
        fault="client",
        param="model",
    )


def beta_not_supported() -> GatewayError:
    return GatewayError(
        400,
        "beta_not_supported",
        "The beta of the Realtime protocol is not spoken here; leave out 'OpenAI-Beta: realtime=v1' (in a browser, the "
        "subprotocol 'openai-beta.realtime-v1') and use the generally available events.",
        type="invalid_request_error",
        fault="client",
    )


def upgrade_required(path: str) -> GatewayError:
    return GatewayError(
        426,
        "upgrade_required",
        f"{path} is a WebSocket; connect with a WebSocket client, over HTTP/1.1.",
        type="invalid_request_error",
        fault="client",
        headers=((b"upgrade", b"websocket"),),
    )


def origin_not_allowed(origin: str) -> GatewayError:
    return GatewayError(
        403,
        "origin_not_allowed",
        f"A web page of {origin[:200]!r} may not connect to this gateway.",
        type="invalid_request_error",
        fault="client",
        param="origin",
    )


def bad_handshake(status: int, reason: str) -> GatewayError:
    return GatewayError(
        status,
        "bad_handshake",
        reason,
        type="invalid_request_error",
        fault="client",
        headers=((b"connection", b"close"),),
    )


def head_too_large(limit_bytes: int) -> GatewayError:
    return GatewayError(
        431,
        "head_too_large",
        f"The request line and headers are larger than the limit of {limit_bytes} bytes.",
        type="invalid_request_error",
        fault="client",
        headers=((b"connection", b"close"),),
    )


def too_many_connections(limit: int) -> GatewayError:
    return GatewayError(
        503,
        "too_many_connections",
        f"The gateway has reached its limit of {limit} connections; try again shortly.",
        type="server_error",
        fault="internal",
        retryable=True,
        headers=(*_RETRY_SOON, (b"connection", b"close")),
    )


def head_too_slow(limit_seconds: float) -> GatewayError:
    return GatewayError(
        408,
        "request_timeout",
        f"The request's head did not arrive within {limit_seconds:g} s.",
        type="invalid_request_error",
        fault="client",
        retryable=True,
        headers=((b"connection", b"close"),),
    )


def body_too_large(limit_bytes: int) -> GatewayError:
    return GatewayError(
        413,
        "body_too_large",
        f"The request body is larger than the limit of {limit_bytes} bytes.",
        type="invalid_request_error",
        fault="client",
    )


def body_too_slow(limit_seconds: float) -> GatewayError:
    return GatewayError(
        408,
        "request_timeout",
        f"The request body did not arrive within {limit_seconds:g} s.",
        type="invalid_request_error",
        fault="client",
        retryable=True,
        headers=((b"connection", b"close"),),
    )


def body_not_decoded(limit_seconds: float) -> GatewayError:
    return GatewayError(
        408,
        "request_timeout",
        f"The compressed request body was not decoded within {limit_seconds:g} s; send it uncompressed.",
        type="invalid_request_error",
        fault="client",
        retryable=True,
    )


def invalid_json(reason: str) -> GatewayError:
    return GatewayError(
        400,
        "invalid_json",
        f"The request body must be a JSON object: {reason}",
        type="invalid_request_error",
        fault="client",
    )


def invalid_form(reason: str) -> GatewayError:
    return GatewayError(
        400,
        "invalid_form",
        f"The request body must be a form (multipart/form-data): {reason}",
        type="invalid_request_error",
        fault="client",
    )


def unsupported_media_type(given: str, accepted: str = "application/json") -> GatewayError:
    return GatewayError(
        415,
        "unsupported_media_type",
        f"The content type {given[:100]!r} is not accepted here; send {accepted}.",
        type="invalid_request_error",
        fault="client",
    )


def unsupported_stateful(reason: str, *, param: str | None = None) -> GatewayError:
    """What would need state inside one engine, which would be gone after a promotion and unknown to other workers."""
    return GatewayError(
        400,
        "unsupported_stateful",
        f"Workers keep no state between requests: {reason}.",
        type="invalid_request_error",
        fault="client",
        param=param,
    )


def model_required(models: Sequence[str]) -> GatewayError:
    listed = ", ".join(repr(model[:200]) for model in models[:10])
    return GatewayError(
        400,
        "model_required",
        f"Several models are served here and the request names none; set model to one of {listed}.",
        type="invalid_request_error",
        fault="client",
        param="model",
    )


def unsupported_encoding(given: str, known: Sequence[str]) -> GatewayError:
    listed = ", ".join(known)
    return GatewayError(
        415,
        "unsupported_content_encoding",
        f"The content encoding {given[:100]!r} is not accepted here; send one of {listed}, or the body as it is.",
        type="invalid_request_error",
        fault="client",
        headers=((b"accept-encoding", listed.encode("ascii")),),
    )


def invalid_encoding(coding: str, reason: str) -> GatewayError:
    return GatewayError(
        400,
        "invalid_content_encoding",
        f"The request body is not what its content encoding {coding} says: {reason}.",
        type="invalid_request_error",
        fault="client",
    )


def body_stalled(limit_seconds: float, least_bytes: int) -> GatewayError:
    return GatewayError(
        408,
        "request_timeout",
        f"Less than {least_bytes} bytes of the request body arrived within {limit_seconds:g} s.",
        type="invalid_request_error",
        fault="client",
        retryable=True,
        headers=((b"connection", b"close"),),
    )


def worker_lost(reason: str, *, lost: int = 0) -> GatewayError:
    """As an error event after something was delivered; as 502 when all attempts broke before that. ``lost``: how many
    workers broke, where none brought anything; ``reason`` is about the last one."""
    many = f"{lost} workers were" if lost > 1 else "The worker was"
    what = f"{many} lost before any answer" if lost else "This answer was cut off: its worker was lost"
    return GatewayError(
        502,
        "worker_lost",
        f"{what} ({reason}); try the request again.",
        type="server_error",
        fault="upstream",
        retryable=True,
    )


def not_taken_up(waited_seconds: float, *, full: bool) -> GatewayError:
    """An answer had begun, its worker broke, and nobody went on with it: no refusal, as the client has a part of it.
    ``full``: there were workers, without room."""
    why = "every other one was full" if full else "no other one became ready"
    return GatewayError(
        503,
        "no_worker",
        f"This answer was cut off: its worker was lost, and {why} within {waited_seconds:g} s to go on with it; "
        "try the request again.",
        type="server_error",
        fault="upstream",
        retryable=True,
    )


def request_kills_worker(*, delivered: bool = False, repeated: bool = False) -> GatewayError:
    """Workers died of it again and again, the last times while nothing else was under suspicion. ``delivered``: after a
    part of its answer had come. ``repeated``: what the same request is answered for a while then."""
    if repeated:
        said = "Workers died of this very request less than ten minutes ago: it is refused without being tried."
    else:
        died = "each one that went on with its answer" if delivered else "each one that took it"
        came = "bring more of it" if delivered else "answer"
        said = (
            f"Workers die of this request: {died} ended before it could {came}. It is not tried again, and the same "
            "request is refused for ten minutes."
        )
    return GatewayError(
        500,
        "request_kills_worker",
        said,
        type="server_error",
        fault="client",
        headers=((b"x-should-retry", b"false"),),
    )


def unusable_answer(reason: str) -> GatewayError:
    """When nothing was delivered and all attempts ended so; ``reason`` is about the last one."""
    return bad_answer(f"The worker's answer cannot be used ({reason}); try the request again.")


def bad_answer(reason: str) -> GatewayError:
    return GatewayError(502, "bad_answer", reason, type="server_error", fault="upstream", retryable=True)


def not_found(path: str, *, because: str = "") -> GatewayError:
    return GatewayError(
        404,
        "not_found",
        because or f"There is no route {path[:200]!r} here.",
        type="invalid_request_error",
        fault="client",
    )


def method_not_allowed(method: str, path: str, allowed: Sequence[str]) -> GatewayError:
    listed = ", ".join(allowed)
    return GatewayError(
        405,
        "method_not_allowed",
        f"{method[:20]} is not allowed on {path[:200]!r}; use {listed}."
        if listed
        else f"{method[:20]} is not allowed.",
        type="invalid_request_error",
        fault="client",
        headers=((b"allow", listed.encode("ascii", "replace")),) if listed else (),
    )


def malformed_request(reason: str = "") -> GatewayError:
    said = f": {reason}." if reason else "."
    return GatewayError(
        400,
        "malformed_request",
        f"The bytes received are not an HTTP/1.1 request{said}",
        type="invalid_request_error",
        fault="client",
        headers=((b"connection", b"close"),),
    )


def unsupported_version(given: str) -> GatewayError:
    return GatewayError(
        505,
        "unsupported_http_version",
        f"HTTP/{given[:10]} is not spoken here; use HTTP/1.1.",
        type="invalid_request_error",
        fault="client",
        headers=((b"connection", b"close"),),
    )


def expectation_failed(given: str) -> GatewayError:
    return GatewayError(
        417,
        "expectation_failed",
        f"The expectation {given[:100]!r} cannot be met here; only 100-continue can.",
        type="invalid_request_error",
        fault="client",
        headers=((b"connection", b"close"),),
    )


def unknown_transfer_encoding(given: str) -> GatewayError:
    return GatewayError(
        501,
        "unsupported_transfer_encoding",
        f"The transfer encoding {given[:100]!r} is not understood here; send chunked alone, or a content-length.",
        type="invalid_request_error",
        fault="client",
        headers=((b"connection", b"close"),),
    )


def internal() -> GatewayError:
    return GatewayError(
        500,
        "internal_error",
        "The gateway failed on this request; its log says why.",
        type="server_error",
        fault="internal",
    )


def from_status(status: int, message: str) -> GatewayError:
    """An envelope for a status that somebody else chose: the web framework, or a worker that answered without one."""
    client = status < 500
    code = _CODES.get(status)
    return GatewayError(
        400 if status == 422 else status,
        code or ("bad_request" if client else "internal_error"),
        message,
        type="rate_limit_error" if status == 429 else "invalid_request_error" if client else "server_error",
        fault="client" if client else "upstream",
    )


def task_not_served(model: str, path: str) -> GatewayError:
    serving = f"The model {model[:200]!r} does not serve" if model else "The model here does not serve"
    return GatewayError(
        404,
        "task_not_served",
        f"{serving} {path}: it is for another task.",
        type="invalid_request_error",
        fault="client",
        param="model",
    )
