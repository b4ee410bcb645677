"""Which errors of a start are for a person, and which may pass."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from workers.engine import EngineConfigError, EngineDeadError
from workers.engines.vllm.start_failure import failure_of, is_for_a_person


class SafetensorError(Exception):
    """As the library's, which is an Exception only."""


def system(number: int, kind: type[OSError] = OSError) -> OSError:
    return kind(number, os.strerror(number), "/model/model.safetensors")


def behind(error: BaseException, other: Exception) -> Exception:
    other.__cause__ = error
    return other


def while_handling(error: BaseException, other: Exception) -> Exception:
    other.__context__ = error
    return other


@pytest.mark.parametrize("number", ["EIO", "EMFILE", "ENFILE", "ENOMEM", "EAGAIN", "ENOSPC", "ESTALE", "ETIMEDOUT"])
def test_what_the_machine_lacks_for_a_moment_may_pass(number: str) -> None:
    error = system(getattr(errno, number))
    for found in (error, behind(error, ValueError("no such model")), while_handling(error, OSError("Can't load it"))):
        assert isinstance(failure_of(found, "with these settings"), EngineDeadError)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        ValueError("Free memory on device cuda:0 (3.1/80 GiB) on startup is less than desired GPU memory utilization"),
        SafetensorError("I/O error: Cannot allocate memory (os error 12)"),
    ],
)
def test_memory_that_is_short_may_be_there_the_next_time(error: Exception) -> None:
    failure = failure_of(error, "with these settings")
    assert isinstance(failure, EngineDeadError)
    assert "not enough memory" in str(failure)


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("I/O error: Too many open files (os error 24)"),
        OSError("Input/output error (os error 5)"),
        TimeoutError("the lock of a cache"),
        ConnectionResetError("by peer"),
    ],
)
def test_so_may_what_libraries_tell_of_it(error: Exception) -> None:
    assert isinstance(failure_of(error, "with these settings"), EngineDeadError)


@pytest.mark.parametrize(
    "error",
    [
        system(errno.ENOENT),
        system(errno.EACCES, PermissionError),
        system(errno.EISDIR, IsADirectoryError),
        system(errno.ENOTDIR),
        OSError("No such device (os error 19)"),  # safetensors of a folder
        OSError("/model does not appear to have a file named preprocessor_config.json"),
        ValueError("Model architectures ['NoSuchModel'] are not supported for now"),
        KeyError("rope_theta"),
        AssertionError("heads"),
        SafetensorError("Error while deserializing header: header too small"),
        FileNotFoundError("No such file or directory: /nowhere/model.safetensors"),
    ],
)
def test_settings_and_models_are_for_a_person(error: Exception) -> None:
    assert is_for_a_person(error)
    failure = failure_of(error, "with these settings")
    assert isinstance(failure, EngineConfigError)
    assert str(failure).startswith("with these settings: ")


def test_a_file_that_is_there_and_was_not_found_could_not_be_opened(tmp_path: Path) -> None:
    """safetensors says so for want of descriptors; of errno it says nothing."""
    found = tmp_path / "model.safetensors"
    error = FileNotFoundError(f"No such file or directory: {found}")
    assert isinstance(failure_of(error, "with these settings"), EngineConfigError)
    found.touch()
    assert isinstance(failure_of(error, "with these settings"), EngineDeadError)


def test_an_error_that_was_raised_from_none_is_what_it_says() -> None:
    error = while_handling(system(errno.EIO), ValueError("no such argument"))
    error.__suppress_context__ = True
    assert isinstance(failure_of(error, "with these settings"), EngineConfigError)


def test_other_errors_are_mistakes_and_no_persons() -> None:
    assert not is_for_a_person(RuntimeError("shape mismatch"))
