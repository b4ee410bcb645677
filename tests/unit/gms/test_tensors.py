"""Modules over an arena: a writer's is packed, a meta-device twin is installed over the same pages, read-only."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from gms import tensors
from gms.dlpack import raw_bytes
from gms.manifest import ALIGNMENT, Manifest, Slot
from gms.mapping import Chunk, Reservation

ROOT = Path(__file__).parents[3]
DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
]


class Pages:
    """An allocation as the service would hold it, and mappings of it as engines would make them."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.fd = os.memfd_create("test", os.MFD_CLOEXEC)
        self.stack.callback(os.close, self.fd)

    def map(self, size_bytes: int, *, writable: bool) -> Any:
        place = self.stack.enter_context(Reservation(size_bytes))
        os.truncate(self.fd, place.size_bytes)
        place.map([Chunk(self.fd, place.size_bytes)], writable=writable)
        return tensors.arena(place)

    def write(self, module: Any) -> Manifest:
        """Packs a module and returns what a reader gets: a manifest that has been bytes."""
        manifest, stored = tensors.plan(module, tag="weights")
        tensors.pack(manifest, stored, self.map(manifest.size_bytes, writable=True))
        return Manifest.decode(manifest.encode())

    def read(self, twin: Any, manifest: Manifest) -> Any:
        tensors.install(twin, manifest, self.map(manifest.size_bytes, writable=False))
        return twin


@pytest.fixture(scope="module", autouse=True)
def a_small_heap() -> Iterator[None]:
    """What other tests left is not looked through at each end."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def pages() -> Iterator[Pages]:
    made = Pages()
    yield made
    gc.collect()
    made.stack.close()


def twin_of(build: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return build()


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Different elements, exact in every dtype."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 7).to(dtype).reshape(shape)


def raw(tensor: torch.Tensor) -> list[int]:
    """A tensor's elements as bytes: fp8 and NaN compare by nothing else."""
    elements: list[int] = (
        tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).tolist()
    )
    return elements


def permissions(tensor: torch.Tensor) -> str:
    """Of the mapping that a tensor's first byte lies in."""
    address = tensor.data_ptr()
    with open("/proc/self/maps") as lines:
        for line in lines:
            bounds, rights = line.split()[:2]
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            if start <= address < end:
                return rights
    raise AssertionError("that address is not mapped")


class Net(torch.nn.Module):
    """Parameters, one of them tied; buffers of both kinds; an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 32)
        self.norm = torch.nn.BatchNorm1d(32)
        self.head = torch.nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(32.0), persistent=False)
        self.scale = torch.tensor(0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.embed(tokens)) * self.scale + self.table)
        return logits


def test_a_reader_computes_what_the_writer_did(pages: Pages) -> None:
    writer, tokens = Net().eval(), torch.tensor([1, 2, 3])
    before = writer(tokens)
    manifest = pages.write(writer)
    assert torch.equal(writer(tokens), before)
    reader = pages.read(twin_of(Net).eval(), manifest)
    assert torch.equal(reader(tokens), before)
    assert tensors.unfilled(reader) == []
    assert list(reader.state_dict()) == list(writer.state_dict())
    assert all(not parameter.requires_grad for parameter in reader.parameters())


def test_only_parameters_are_shared(pages: Pages) -> None:
    writer = Net().eval()
    manifest = pages.write(writer)
    reader = pages.read(twin_of(Net).eval(), manifest)
    assert {permissions(parameter) for parameter in reader.parameters()} == {"r--s"}
    assert {permissions(parameter) for parameter in writer.parameters()} == {"rw-s"}
    for module in (reader, writer):
        private = [*module.buffers(), module.scale]
        assert {permissions(tensor) for tensor in private} == {"rw-p"}
    reader.table.add_(1)
    reader.norm.running_mean.fill_(9)
    reader.scale.fill_(9)
    other = pages.read(twin_of(Net), manifest)
    assert other.table[0] == 0
    assert other.norm.running_mean[0] == 0
    assert other.scale == 0.5
    assert writer.scale == 0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_shared_bit_by_bit(pages: Pages, dtype: torch.dtype) -> None:
    class One(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(5, 3, dtype=dtype), requires_grad=False)
            self.register_buffer("buffer", torch.empty(3, dtype=dtype))
            self.attribute = torch.empty((), dtype=dtype)

    writer = One()
    writer.weight.data = values((5, 3), dtype)
    writer.buffer = values((3,), dtype)
    writer.attribute = values((2,), dtype)[1]
    reader = pages.read(twin_of(One), pages.write(writer))
    for name in ("weight", "buffer", "attribute"):
        ours, theirs = getattr(reader, name), getattr(writer, name)
        assert (ours.dtype, ours.shape, raw(ours)) == (dtype, theirs.shape, raw(theirs))
    assert permissions(reader.weight) == "r--s"
    assert permissions(reader.buffer) == permissions(reader.attribute) == "rw-p"


class Bag(torch.nn.Module):
    """Parameters as given, or of their shapes on the meta device."""

    def __init__(self, **given: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in given.items():
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))


def bag_twin(**given: torch.Tensor) -> Bag:
    return Bag(**{name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in given.items()})


@pytest.mark.parametrize(
    "make",
    [
        lambda base: base.t(),
        lambda base: base[::2, 1:5],
        lambda base: base[3:, 2:].t(),
        lambda base: base.as_strided((3, 4), (1, 2), 5),
        lambda base: base[2:3, 4].expand(6, 1),
        lambda base: base.view(4, 2, 8).permute(2, 0, 1),
        lambda base: base[7, 7],
    ],
    ids=["transposed", "steps", "corner transposed", "overlapping", "expanded", "permuted", "scalar at the end"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.float32], ids=str)
def test_strides_stay(pages: Pages, make: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
    given = {"weight": make(values((8, 8), dtype))}
    want = raw(given["weight"])
    stride = given["weight"].stride()
    writer = Bag(**given)
    reader = pages.read(bag_twin(**given), pages.write(writer))
    for module in (reader, writer):
        assert (module.weight.stride(), raw(module.weight)) == (stride, want)


def test_of_a_large_storage_only_what_is_seen_is_stored(pages: Pages) -> None:
    large = torch.arange(1 << 20, dtype=torch.float32)
    given = {"first": large[1003:1005], "second": large[1001:1002]}
    writer = Bag(**given)
    manifest = pages.write(writer)
    assert manifest.size_bytes == ALIGNMENT
    slots = manifest.parameters
    assert slots["first"].offset == slots["second"].offset
    assert slots["first"].size_bytes == 5 * 4  # from 1000 on, a multiple of sixteen bytes
    reader = pages.read(bag_twin(**given), manifest)
    assert reader.first.tolist() == [1003, 1004]
    assert reader.second.tolist() == [1001]


def test_tensors_of_one_storage_are_stored_once_and_stay_together(pages: Pages) -> None:
    whole = values((12, 4), torch.bfloat16)
    given = {"qkv": whole, "q": whole[:4], "kv": whole[4:].t(), "bits": whole.view(torch.int16)}
    writer = Bag(**given)
    manifest = pages.write(writer)
    assert manifest.size_bytes == ALIGNMENT
    writer.q.data.fill_(3)
    assert writer.qkv[0, 0] == 3
    reader = pages.read(bag_twin(**given), manifest)
    assert reader.q.data_ptr() == reader.qkv.data_ptr() == reader.bits.data_ptr()
    assert reader.kv.data_ptr() == reader.qkv.data_ptr() + 4 * 4 * 2
    assert reader.kv.stride() == (1, 4)
    assert raw(reader.q) == raw(writer.q)


def test_what_was_one_tensor_is_one_tensor(pages: Pages) -> None:
    writer = Net()
    manifest = pages.write(writer)
    assert manifest.aliases == {"head.weight": "embed.weight"}
    reader = pages.read(twin_of(Net), manifest)
    assert reader.head.weight is reader.embed.weight
    assert len(list(reader.parameters())) == len(list(writer.parameters()))


def test_a_module_that_is_in_two_places_stays_one(pages: Pages) -> None:
    def build() -> Any:
        layer = torch.nn.BatchNorm1d(4)
        layer.extra = torch.ones(2)
        return torch.nn.Sequential(layer, layer)

    reader = pages.read(twin_of(build), pages.write(build()))
    assert reader[0] is reader[1]
    assert reader[0].extra.tolist() == [1, 1]
    assert tensors.unfilled(reader) == []


def test_buffers_and_attributes_of_one_storage_stay_together_in_a_clone(pages: Pages) -> None:
    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = torch.zeros(4, 4)
            self.register_buffer("table", table)
            self.row = table[1]
            self.again = self.row

    reader = pages.read(twin_of(Shared), pages.write(Shared()))
    reader.row.fill_(5)
    assert reader.table[1].tolist() == [5.0] * 4
    assert reader.again is reader.row


def test_an_attribute_that_views_a_parameter_views_the_shared_pages(pages: Pages) -> None:
    class Transposed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(values((3, 2), torch.float32))
            self.turned = self.weight.detach().t()
            self.register_buffer("first", self.weight.detach()[0])

    writer = Transposed()
    manifest = pages.write(writer)
    assert manifest.size_bytes == ALIGNMENT
    reader = pages.read(twin_of(Transposed), manifest)
    for module in (writer, reader):
        assert module.turned.data_ptr() == module.first.data_ptr() == module.weight.data_ptr()
        assert torch.equal(module.turned, module.weight.t())
    assert permissions(reader.turned) == "r--s"
    assert not isinstance(reader.turned, torch.nn.Parameter)
    assert list(dict(reader.named_buffers())) == ["first"]


def test_tensors_without_elements_have_a_place_and_no_bytes(pages: Pages) -> None:
    class Empty(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(0, 3, dtype=torch.bfloat16))
            self.other = torch.nn.Parameter(torch.empty(4, 0))
            self.kv_cache = torch.tensor([])
            self.register_buffer("nothing", torch.empty(2, 0, 5))

    reader = pages.read(twin_of(Empty), pages.write(Empty()))
    assert (reader.weight.shape, reader.weight.dtype) == ((0, 3), torch.bfloat16)
    assert reader.other.shape == (4, 0)
    assert reader.kv_cache.device == reader.nothing.device == torch.device("cpu")
    assert reader.nothing.stride() == torch.empty(2, 0, 5).stride()
    assert tensors.unfilled(reader) == []


def test_a_tensor_that_changed_its_kind_is_what_the_writer_made_of_it(pages: Pages) -> None:
    """As when a loader replaces a Parameter by what its kernel wants."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(2, 3))
            self.register_buffer("scale", torch.ones(1), persistent=False)
            self.plain = torch.ones(1)

    writer = Layer()
    weight, scale, plain = writer.weight, writer.scale, writer.plain
    del writer.weight, writer.scale, writer.plain
    writer.weight = weight.detach()
    writer.scale = torch.nn.Parameter(scale.to(torch.bfloat16))
    writer.register_buffer("plain", plain)
    reader = pages.read(twin_of(Layer), pages.write(writer))
    assert dict(reader.named_parameters()).keys() == {"scale"}
    assert reader.scale.dtype == torch.bfloat16
    assert dict(reader.named_buffers()).keys() == {"plain"}
    assert reader.state_dict().keys() == writer.state_dict().keys()
    assert vars(reader)["weight"].tolist() == [[0.0] * 3] * 2


def test_originals_go_one_by_one(pages: Pages) -> None:
    """When a storage's original is released, the next has not been copied yet."""
    copied: list[tuple[int, list[bool]]] = []

    class Original:
        def __init__(self, number: int) -> None:
            self.bytes = ctypes.create_string_buffer(b"\1" * ALIGNMENT, ALIGNMENT)

            def gone() -> None:
                copied.append((number, [bool(arena[at]) for at in range(0, 3 * ALIGNMENT, ALIGNMENT)]))

            weakref.finalize(self, gone)

    def weight(number: int) -> torch.Tensor:
        original = Original(number)
        return raw_bytes(ctypes.addressof(original.bytes), ALIGNMENT, owner=original)  # type: ignore[no-any-return]

    writer = Bag(a=weight(0), b=weight(1), c=weight(2))
    manifest, stored = tensors.plan(writer, tag="weights")
    arena = pages.map(manifest.size_bytes, writable=True)
    tensors.pack(manifest, stored, arena)
    assert copied == [(0, [True, False, False]), (1, [True, True, False]), (2, [True, True, True])]


def test_originals_can_wait_on_the_host(pages: Pages) -> None:
    """Where a device has no room for them and the arena. What lies over one storage stays together."""
    model = Net()
    model.rows = model.embed.weight.data[1:3]
    before = [tensor.clone() for tensor in tensors.all_of(model)]
    manifest, stored = tensors.plan(model, tag="weights")
    originals = [tensor.untyped_storage() for tensor in model.parameters()]  # kept: their places are not taken again
    places = {storage.data_ptr() for storage in originals}
    tensors.unload(manifest, stored, device="cpu")
    assert places.isdisjoint({tensor.untyped_storage().data_ptr() for tensor in model.parameters()})
    assert model.rows.untyped_storage().data_ptr() == model.embed.weight.untyped_storage().data_ptr()
    arena = pages.map(manifest.size_bytes, writable=True)
    tensors.pack(manifest, stored, arena)
    after = list(tensors.all_of(model))
    assert all(one.equal(other) for one, other in zip(before, after, strict=True))
    inside = range(arena.data_ptr(), arena.data_ptr() + arena.numel())
    assert all(tensor.data_ptr() in inside for tensor in (*model.parameters(), model.rows))
    tensors.unload(manifest, stored, device="cuda")  # of which nothing is there
    assert all(tensor.data_ptr() in inside for tensor in model.parameters())


def test_packed_gaps_are_left_as_they_were(pages: Pages) -> None:
    writer = Bag(a=torch.ones(1), b=torch.ones(ALIGNMENT + 1, dtype=torch.int8))
    manifest, stored = tensors.plan(writer, tag="weights")
    arena = pages.map(manifest.size_bytes, writable=True)
    tensors.pack(manifest, stored, arena)
    assert manifest.size_bytes == 3 * ALIGNMENT
    assert int(arena[:ALIGNMENT].count_nonzero()) == 2  # of 1.0 in float32
    assert int(arena.count_nonzero()) == 2 + ALIGNMENT + 1


WRITES = {
    "a parameter": "reader.weight.data[0] = 1",
    "a view": "reader.weight.detach().t().fill_(1)",
    "the arena": "arena[0] = 1",
    "load_state_dict": "reader.load_state_dict({'weight': torch.ones(2, 2), 'scale': torch.ones(1)})",
}


@pytest.mark.parametrize("what", WRITES)
def test_a_write_to_the_shared_pages_is_a_fault(what: str) -> None:
    code = f"""
import faulthandler, os, torch
from gms import tensors
from gms.mapping import Chunk, Reservation
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, 2))
        self.register_buffer("scale", torch.ones(1))
writer = Layer()
manifest, stored = tensors.plan(writer, tag="weights")
fd = os.memfd_create("test")
place = Reservation(manifest.size_bytes)
os.truncate(fd, place.size_bytes)
place.map([Chunk(fd, place.size_bytes)], writable=True)
tensors.pack(manifest, stored, tensors.arena(place))
with torch.device("meta"):
    reader = Layer()
other = Reservation(manifest.size_bytes)
other.map([Chunk(fd, place.size_bytes)], writable=False)
arena = tensors.arena(other)
tensors.install(reader, manifest, arena)
reader.scale.fill_(2)
print(reader.weight.sum().item(), flush=True)
{WRITES[what]}
print("written")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (-11, "0.0\n"), done.stderr


def sparse() -> Any:
    module = torch.nn.Module()
    module.weights = torch.eye(3).to_sparse()
    return module


def conjugated() -> Any:
    module = torch.nn.Module()
    module.register_buffer("wave", torch.ones(2, dtype=torch.complex64).conj())
    return module


def twice() -> Any:
    module = Bag(weight=torch.ones(1))
    vars(module)["weight"] = torch.ones(1)
    return module


@pytest.mark.parametrize(
    ("build", "complaint"),
    [
        (lambda: twin_of(Net), r"embed\.weight \(Parameter\) cannot be shared: it is not loaded"),
        (lambda: torch.nn.LazyLinear(3), r"weight \(UninitializedParameter\) cannot be shared"),
        (sparse, r"weights \(Tensor\) cannot be shared"),
        (conjugated, r"wave \(Tensor\) cannot be shared: its values are more than its bytes"),
        (twice, "two tensors of this name"),
        (torch.nn.ReLU, "no tensors"),
    ],
    ids=["meta", "lazy", "sparse", "conjugated", "twice", "none"],
)
def test_what_cannot_be_shared_is_named(build: Callable[[], Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        tensors.plan(build(), tag="weights")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda m: msgspec.structs.replace(m, parameters={}, aliases={}), r"lack 4 parameters.*embed\.weight"),
        (lambda m: _with(m, "nowhere.at.all"), r"hold nowhere\.at\.all, for which this model has no place"),
        (lambda m: msgspec.structs.replace(m, aliases={"head.weight": "lost"}), r"tie head\.weight to something"),
    ],
    ids=["too few", "too many", "tied to nothing"],
)
def test_another_models_weights_are_refused_before_anything_is_changed(
    pages: Pages, change: Callable[[Manifest], Manifest], complaint: str
) -> None:
    manifest = change(pages.write(Net()))
    twin = twin_of(Net)
    before = copy.copy(tensors.unfilled(twin))
    with pytest.raises(ValueError, match=complaint):
        pages.read(twin, manifest)
    assert tensors.unfilled(twin) == before


def test_what_the_writer_made_into_something_else_stays_empty_in_part(pages: Pages) -> None:
    """As a scale that was loaded as a Parameter, and is a buffer once it was looked at."""
    writer = Net()
    writer.kept = writer.scale.clone()
    del writer.norm.weight
    twin = twin_of(Net)
    manifest = pages.write(writer)
    tensors.install(twin, manifest, pages.map(manifest.size_bytes, writable=False), in_part=True)
    assert tensors.unfilled(twin) == ["norm.weight"]
    assert twin.kept.equal(writer.kept)


def _with(manifest: Manifest, name: str) -> Manifest:
    slot = manifest.parameters["embed.weight"]
    return msgspec.structs.replace(manifest, parameters={**manifest.parameters, name: slot})


GOOD = Slot(offset=0, size_bytes=64, shape=(4, 4), stride=(4, 1), storage_offset=0, dtype="float32")


@pytest.mark.parametrize(
    "bad",
    [
        {"offset": ALIGNMENT},
        {"offset": -64},
        {"size_bytes": -1},
        {"size_bytes": 63},
        {"offset": 2},
        {"storage_offset": 1},
        {"storage_offset": -1},
        {"shape": (5, 4)},
        {"shape": (4, -4)},
        {"shape": (4,)},
        {"stride": (5, 1)},
        {"stride": (-4, 1)},
        {"dtype": "float31"},
        {"dtype": "nn"},
        {"dtype": "float64"},
    ],
    ids=str,
)
def test_a_slot_that_contradicts_itself_is_refused(bad: dict[str, Any]) -> None:
    memory = torch.zeros(ALIGNMENT, dtype=torch.uint8)
    assert tensors.view(memory, GOOD).shape == (4, 4)
    with pytest.raises(ValueError, match=r"outside of|larger than|no tensor|not aligned|no dtype"):
        tensors.view(memory, msgspec.structs.replace(GOOD, **bad))


def test_placeholders_are_filled_and_the_rest_is_named() -> None:
    with torch.device("meta"):
        module = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
        module[0].kv_cache = torch.tensor([])
        module[0].table = torch.zeros(3)
        module.caches = [{"k": (torch.zeros(1), 1)}, "text"]
        module.caches.append(module.caches)
    tensors.fill_empty(module, "cpu")
    assert module[0].kv_cache.device == torch.device("cpu")
    assert tensors.unfilled(module) == ["caches", "0.weight", "0.table"]


def test_the_core_of_the_memory_service_needs_no_torch() -> None:
    code = (
        "import sys, gms.client, gms.factory, gms.integrity, gms.manifest, gms.mapping, gms.server; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
