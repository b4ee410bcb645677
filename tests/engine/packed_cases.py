"""Packed matrices over shared pages: a writer's layers and a reader's. Run by test_packed in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import vllm._custom_ops as custom_ops
import vllm.model_executor.layers.utils as layer_utils

from gms import tensors
from gms.mapping import Chunk, Reservation
from workers.engine import EngineDeadError
from workers.engines.vllm import packed

SIZES = {"first": (960, 576), "second": (200, 1000), "small": (64, 64)}


class Pages:
    """Of ``WeightsMemory`` what packed matrices need."""

    def __init__(self, range_: Reservation) -> None:
        self._range = range_

    def mirror(self, address: int, size_bytes: int, to: int) -> None:
        self._range.mirror(address - self._range.address, size_bytes, to)


class Shared:
    """What a writer has committed: its model's twin can be had again and again."""

    def __init__(self, model: Any, stack: ExitStack) -> None:
        with packed.recording() as handlers:
            for layer in model.children():
                layer_utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        self.noted = packed.note(model, handlers)
        self.manifest, stored = tensors.plan(model, tag="weights")
        fd = os.memfd_create("test", os.MFD_CLOEXEC)
        stack.callback(os.close, fd)
        os.ftruncate(fd, self.manifest.size_bytes)
        self._range = Reservation(self.manifest.size_bytes)
        self._chunk = Chunk(fd, self.manifest.size_bytes)
        self._range.map([self._chunk], writable=True)
        tensors.pack(self.manifest, stored, tensors.arena(self._range))
        self._range.map([self._chunk], writable=False)
        self.pages: Any = Pages(self._range)
        packed.share(model, self.noted, self.pages)

    def twin(self) -> Any:
        """A reader's model before it is finished."""
        with torch.device("meta"):
            model = model_of(SIZES)
        tensors.install(model, self.manifest, tensors.arena(self._range), in_part=True)
        with packed.unpacked():
            for layer in model.children():
                layer_utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        return model


def model_of(sizes: dict[str, tuple[int, int]]) -> Any:
    model = torch.nn.Module()
    for name, (n, k) in sizes.items():
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(torch.randn(n, k), requires_grad=False)
        model.add_module(name, layer)
    return model


def answers(model: Any) -> dict[str, Any]:
    """Of each layer to the same three rows."""
    rows = {name: torch.linspace(-2, 2, 3 * k).reshape(3, k) for name, (_, k) in SIZES.items()}
    return {name: layer.cpu_linear(rows[name], layer.weight, None) for name, layer in model.named_children()}


@pytest.fixture
def written() -> Iterator[tuple[Any, Shared, dict[str, Any]]]:
    """A writer's model, what it committed, and what its matrices make of some rows by plain multiplication."""
    torch.manual_seed(7)
    model = model_of(SIZES)
    rows = {name: torch.linspace(-2, 2, 3 * k).reshape(3, k) for name, (_, k) in SIZES.items()}
    plain = {name: rows[name] @ layer.weight.t() for name, layer in model.named_children()}
    with ExitStack() as stack:
        yield model, Shared(model, stack), plain


def mapped_shared(address: int) -> bool:
    with open("/proc/self/maps") as lines:
        for line in lines:
            bounds, rights = line.split()[:2]
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            if start <= address < end:
                return rights == "r--s"
    return False


def test_it_can_be_used_here() -> None:
    assert packed.usable()


def test_writer_and_reader_multiply_over_the_same_pages(written: tuple[Any, Shared, dict[str, Any]]) -> None:
    model, shared, plain = written
    twin = shared.twin()
    packed.install(twin, shared.pages)
    for name, answered in answers(model).items():
        assert torch.allclose(answered, plain[name], rtol=1e-4, atol=1e-3)
        assert torch.equal(answered, answers(twin)[name])
    assert set(shared.noted) == {"first", "second"}  # a small one stays as it is
    assert all(mapped_shared(handler.place.start) for handler in shared.noted.values())
    assert "small.weight" in shared.manifest.parameters
    assert shared.manifest.parameters["first.weight"].size_bytes == 0


def test_a_reader_that_packs_in_another_way_is_refused(written: tuple[Any, Shared, dict[str, Any]]) -> None:
    _, shared, _ = written
    twin = shared.twin()
    twin.second._buffers[packed.ANSWERED] += 1
    with pytest.raises(ValueError, match=r"packed weights of second cannot be shared.*what it multiplies to"):
        packed.install(twin, shared.pages)
    twin = shared.twin()
    twin.first._buffers[packed.ASKED] = torch.zeros(1000)
    with pytest.raises(ValueError, match=r"packed weights of first cannot be shared.*bytes instead of"):
        packed.install(twin, shared.pages)


def test_a_reader_that_does_not_see_where_it_packed_may_see_it_the_next_time(
    written: tuple[Any, Shared, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, shared, _ = written
    twin = shared.twin()
    monkeypatch.setattr(packed, "only_new", lambda before, after, size: None)
    with pytest.raises(EngineDeadError, match=r"packed weights of first cannot be shared this time.*not to be seen"):
        packed.install(twin, shared.pages)


def test_layers_over_one_weight_are_stored_once() -> None:
    model = model_of({"first": (960, 576)})
    model.tied = torch.nn.Module()
    model.tied.weight = model.first.weight
    with packed.recording() as handlers:
        for layer in model.children():
            layer_utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    packed.note(model, handlers)
    manifest, _ = tensors.plan(model, tag="weights")
    assert len(handlers) == 2
    offsets = {slot.offset for name, slot in manifest.parameters.items() if name.endswith(packed.PACKED)}
    assert len(offsets) == 1


def test_memory_that_is_not_seen_leaves_a_matrix_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "only_new", lambda before, after, size: None)
    model = model_of({"first": (960, 576)})
    with packed.recording() as handlers:
        layer_utils.dispatch_cpu_unquantized_gemm(model.first, remove_weight=True)
    assert handlers == {}
    assert model.first.weight.shape == (960, 576)
    assert packed.note(model, handlers) == {}
    assert not packed.usable()
    rows = torch.ones(2, 576)
    assert torch.allclose(model.first.cpu_linear(rows, model.first.weight, None), rows @ model.first.weight.t())


def test_vllm_is_as_it_was_afterwards() -> None:
    before = (custom_ops.create_onednn_mm, custom_ops._supports_onednn, layer_utils.check_cpu_sgl_kernel)
    with packed.recording(), packed.unpacked():
        pass
    with pytest.raises(KeyError), packed.recording(), packed.unpacked():
        raise KeyError
    assert (custom_ops.create_onednn_mm, custom_ops._supports_onednn, layer_utils.check_cpu_sgl_kernel) == before
