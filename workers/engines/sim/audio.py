"""``POST /v1/audio/transcriptions`` and ``/v1/audio/translations``: what a file "says" is made from its hash."""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import Any, Final

import msgspec
from python_multipart import FormParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from workers.engines.sim.api import ApiError, Job, check_model, make_job

WORDS: Final = 16
"""Length of every transcription, in tokens."""
_TRUE: Final = ("true", "1")


def parse_audio(body: bytes, content_type: bytes, *, model: str, max_model_len: int) -> Job:
    """Check a form.

    Raises:
        ApiError: 400 or 404, with the field that is wrong.
    """
    fields, file = _read_form(body, content_type)
    check_model(fields.get("model") or None, model)
    if file is None:
        raise ApiError(400, "the form has no file", param="file")
    if not file:
        raise ApiError(400, "the file is empty", param="file")
    if fields.get("response_format", "json") != "json":
        raise ApiError(400, "the only response_format here is json", param="response_format")
    heard = blake2b(file, digest_size=16).digest()
    return make_job(
        list(heard), WORDS, max_model_len=max_model_len, param="file", stream=fields.get("stream", "").lower() in _TRUE
    )


def _read_form(body: bytes, content_type: bytes) -> tuple[dict[str, str], bytes | None]:
    """The text fields, and the contents of the field ``file``."""
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise ApiError(400, "the body must be multipart/form-data with a boundary", code="invalid_form")
    fields: dict[str, str] = {}
    files: list[bytes] = []

    def on_field(field: Any) -> None:
        fields[field.field_name.decode("utf-8", "replace")] = (field.value or b"").decode("utf-8", "replace")

    def on_file(file: Any) -> None:
        if file.field_name == b"file":
            file.file_object.seek(0)
            files.append(file.file_object.read())
        file.close()

    parser = FormParser(
        "multipart/form-data",
        on_field,
        on_file,
        boundary=options[b"boundary"],
        config={"MAX_MEMORY_FILE_SIZE": math.inf},  # the body is in memory anyway
    )
    try:
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise ApiError(400, f"the body is not a form: {error}", code="invalid_form") from None
    finally:
        parser.close()
    return fields, files[0] if files else None


class AudioForm:
    """Chunks as vLLM sends them, or one document. ``kind``: transcription or translation."""

    cached_tokens = 0

    def __init__(self, job: Job, *, request_id: str, model: str, created: int, kind: str) -> None:
        self._job = job
        self._head = {"id": f"{kind[:5]}-{request_id}", "object": f"{kind}.chunk", "created": created, "model": model}

    def opening(self) -> bytes:
        return b""

    def text(self, text: str) -> bytes:
        return self._event(text, None)

    def last(self, text: str, finish: str) -> bytes:
        return self._event(text, "stop")

    def closing(self, completion_tokens: int) -> bytes:
        return b"data: [DONE]\n\n"

    def document(self, text: str, finish: str, completion_tokens: int) -> bytes:
        return msgspec.json.encode({"text": text, "usage": {"type": "duration", "seconds": 1}})

    def _event(self, text: str, finish: str | None) -> bytes:
        choice = {"delta": {"content": text}, "finish_reason": finish}
        return b"data: " + msgspec.json.encode({**self._head, "choices": [choice]}) + b"\n\n"
