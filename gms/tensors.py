"""A torch module's tensors in one arena of the service's memory: planned, packed by the writer, installed by readers.

What is shared, and stays read-only, are the storages of Parameters. Everything else is small, and some of it is written
to while a model runs or is being finished (scales, caches), so a reader clones it. Tensors that lie over one storage
lie over one storage again, shared or cloned: tied weights stay tied, by name or by view. A plain attribute that is a
view of a Parameter is a view of the shared pages, as it was a view of the Parameter.

An arena is a uint8 tensor over the allocation, on the device that the model runs on. Nothing here knows a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import torch

from gms.dlpack import raw_bytes
from gms.manifest import Manifest, Slot, SlotPlanner
from gms.mapping import Reservation

_LARGEST_ELEMENT: Final = 16
"""Bytes of a complex128. A storage that is stored in part begins at a multiple of it, for every dtype's sake."""


def arena(place: Reservation) -> Any:
    """The reservation as a uint8 tensor on its device. Reads nothing, so what stands behind it may come later."""
    return raw_bytes(place.address, place.size_bytes, device=place.memory.dlpack_device, owner=place)


def plan(module: Any, *, tag: str) -> tuple[Manifest, dict[str, Any]]:
    """Where each tensor of a loaded module goes in the allocation `tag`, and the tensors that are stored, by name.

    Of a storage that several tensors share, the part that any of them can see is stored, once. Raises ValueError: a
    tensor that is not plain memory (not loaded, sparse, quantized by torch, a wrapper), on two accelerators, or none.
    """
    tensors: dict[str, Any] = {}
    kinds: dict[str, list[str]] = {}
    aliases: dict[str, str] = {}
    spans: dict[str, _Span] = {}
    seen: dict[_Storage, _Span] = {}
    for kind, named in _named(module):
        kinds[kind] = []
        names: dict[int, str] = {}
        for name, tensor in named:
            if (known := names.setdefault(id(tensor), name)) != name:
                aliases[name] = known
                continue
            if name in tensors:
                raise ValueError(f"{name} cannot be shared: the module has two tensors of this name")
            storage, span = _location(name, tensor)
            tensors[name], spans[name] = tensor, seen.setdefault(storage, span)
            spans[name].include(span)
            kinds[kind].append(name)
    if not tensors:
        raise ValueError("this module has no tensors: there is nothing to share")
    _one_accelerator(tensors)
    planner = SlotPlanner()
    for span in seen.values():
        span.offset = planner.place(span.size_bytes)
    slots = {kind: {name: _slot(tensors[name], spans[name]) for name in kinds[kind]} for kind in kinds}
    return Manifest(tag=tag, size_bytes=planner.size_bytes, aliases=aliases, **slots), tensors


def unload(manifest: Manifest, tensors: dict[str, Any], *, device: str) -> None:
    """Moves what readers will share from `device` (torch's name of the kind) to the host's memory, one storage at a
    time, for where there is no room for it and an arena. `pack` brings it back; until then the module cannot be used.
    """
    shared = _shared(manifest, device)
    for offset, names in _together(manifest).items():
        if offset in shared:
            first = manifest.slots()[names[0]]
            moved = _visible(tensors[names[0]], first).to("cpu", copy=True)
            for name in names:
                tensors[name].data = view(moved, msgspec.structs.replace(manifest.slots()[name], offset=0))


def pack(manifest: Manifest, tensors: dict[str, Any], arena: Any) -> None:
    """Copies what `plan` planned into a writable arena, and puts what readers will share over it in the writer as well.

    One storage at a time: its copy is made, its tensors are moved, and the original is free before the next. When this
    returns the copies are complete, on a GPU too.
    """
    slots = manifest.slots()
    shared = _shared(manifest, arena.device.type)
    views = Views(arena)
    for offset, names in _together(manifest).items():
        _stored(arena, slots[names[0]]).copy_(_visible(tensors[names[0]], slots[names[0]]))
        if offset in shared:
            for name in names:
                tensors[name].data = views.of(slots[name])
    if arena.is_cuda:
        torch.cuda.synchronize(arena.device)


def install(module: Any, manifest: Manifest, arena: Any, *, in_part: bool = False) -> None:
    """Gives a meta-device twin of the writer's module its tensors: Parameters over the arena, which is only read, and
    clones of buffers and attributes.

    `in_part`: Parameters that the manifest lacks stay on the meta device; whoever finishes the module takes them away
    (what was loaded into them has become something else in the writer), or `unfilled` names them.

    Raises ValueError: the module has Parameters that the manifest lacks, or no place for what the manifest holds; the
    module is then not changed. ValueError too for a manifest that contradicts itself.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    _matches(module, modules, manifest, in_part=in_part)
    kinds = {"parameters": manifest.parameters, "buffers": manifest.buffers, "attributes": manifest.attributes}
    shared = _shared(manifest, arena.device.type)
    views = Views(arena)
    clones: dict[int, Any] = {}
    installed: dict[str, tuple[str, Any]] = {}
    for kind, slots in kinds.items():
        for name, slot in slots.items():
            if slot.offset in shared:
                tensor = views.of(slot)
            else:
                if slot.offset not in clones:
                    clones[slot.offset] = _private(arena, slot)
                tensor = view(clones[slot.offset], msgspec.structs.replace(slot, offset=0))
            if kind == "parameters":
                tensor = torch.nn.Parameter(tensor, requires_grad=False)
            installed[name] = (kind, tensor)
    for name, stored in manifest.aliases.items():
        installed[name] = installed[stored]
    for name, (kind, tensor) in installed.items():
        owner, _, leaf = name.rpartition(".")
        _put(modules[owner], leaf, kind, tensor)


class Views:
    """The tensors of slots, over one arena's memory. The arena is typed once for each dtype, so that a tensor costs one
    call of torch."""

    def __init__(self, arena: Any) -> None:
        self._arena = arena
        self._typed: dict[str, tuple[Any, int]] = {}  # dtype -> the arena as such, and the bytes of an element

    def of(self, slot: Slot) -> Any:
        """Raises ValueError if the tensor does not lie within its storage, or is of no dtype that torch knows."""
        typed, itemsize = self._typed.get(slot.dtype) or self._as(slot.dtype)
        if slot.offset < 0 or slot.size_bytes < 0 or slot.offset + slot.size_bytes > self._arena.numel():
            raise _outside(self._arena, slot)
        start, rest = divmod(slot.offset, itemsize)
        if rest:
            raise ValueError(f"a tensor of {slot.dtype} at {slot.offset} is not aligned")
        if _end(slot) * itemsize > slot.size_bytes:
            raise ValueError(f"a tensor of shape {slot.shape} and stride {slot.stride} is larger than its storage")
        return typed.as_strided(slot.shape, slot.stride, typed.storage_offset() + start + slot.storage_offset)

    def _as(self, name: str) -> tuple[Any, int]:
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"this torch has no dtype {name!r}: the weights were written by another version")
        if self._arena.storage_offset() % dtype.itemsize:
            raise ValueError(f"an arena that begins at byte {self._arena.storage_offset()} is not aligned for {name}")
        whole = self._arena.numel() // dtype.itemsize * dtype.itemsize
        self._typed[name] = self._arena[:whole].view(dtype), dtype.itemsize
        return self._typed[name]


def view(arena: Any, slot: Slot) -> Any:
    """The tensor of one slot; see `Views`."""
    return Views(arena).of(slot)


def fill_empty(module: Any, device: Any) -> None:
    """Replaces attributes on the meta device that have no elements, placeholders for what comes later, by such ones on
    `device`."""
    for _, owner in module.named_modules():
        for leaf, value in list(vars(owner).items()):
            if isinstance(value, torch.Tensor) and value.is_meta and value.numel() == 0:
                vars(owner)[leaf] = torch.empty_like(value, device=device)


def all_of(module: Any) -> Iterator[Any]:
    """Every tensor of a module that `plan` would find: Parameters, buffers and attributes."""
    for _, named in _named(module):
        for _, tensor in named:
            yield tensor


def unfilled(module: Any) -> list[str]:
    """Names of tensors that are on the meta device still: parameters, buffers, and attributes of modules, also those
    within lists, tuples and dictionaries."""
    found: list[str] = []
    for prefix, owner in module.named_modules():
        for kind in (owner._parameters, owner._buffers, vars(owner)):
            for leaf, value in kind.items():
                if leaf not in _REGISTERS and any(tensor.is_meta for tensor in _within(value)):
                    found.append(_joined(prefix, leaf))
    return found


_Storage = tuple[Any, int, int]
"""A storage's device, address and size: what makes two of them the same memory."""


@dataclass
class _Span:
    """The bytes of a storage, from `start` up to `end`, that a tensor or several can see, and their place."""

    start: int
    end: int
    offset: int = 0

    @property
    def size_bytes(self) -> int:
        return self.end - self.start

    def include(self, other: _Span) -> None:
        self.start, self.end = min(self.start, other.start), max(self.end, other.end)


_REGISTERS: Final = frozenset({"_parameters", "_buffers", "_modules"})


def _named(module: Any) -> Iterator[tuple[str, Iterator[tuple[str, Any]]]]:
    yield "parameters", module.named_parameters(remove_duplicate=False)
    yield "buffers", module.named_buffers(remove_duplicate=False)
    yield "attributes", _attributes(module)


def _attributes(module: Any) -> Iterator[tuple[str, Any]]:
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for leaf, value in vars(owner).items():
            if isinstance(value, torch.Tensor):
                yield _joined(prefix, leaf), value


def _location(name: str, tensor: Any) -> tuple[_Storage, _Span]:
    try:
        if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            raise ValueError("its values are more than its bytes say")
        storage = tensor.untyped_storage()
        where = (tensor.device, storage.data_ptr(), storage.nbytes())
        if tensor.numel() and not where[1]:
            raise ValueError("it is not loaded")
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise ValueError(f"{name} ({type(tensor).__name__}) cannot be shared: {error}") from error
    if not tensor.numel():
        return (tensor.device, -id(tensor), 0), _Span(0, 0)  # all of these have the same address, none
    start = tensor.storage_offset() * tensor.itemsize
    end = start + _reach(tensor.shape, tensor.stride()) * tensor.itemsize
    return where, _Span(start - start % _LARGEST_ELEMENT, end)


def _slot(tensor: Any, span: _Span) -> Slot:
    return Slot(
        offset=span.offset,
        size_bytes=span.size_bytes,
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        storage_offset=tensor.storage_offset() - span.start // tensor.itemsize if tensor.numel() else 0,
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=tensor.device.type,
    )


def _one_accelerator(tensors: dict[str, Any]) -> None:
    devices = {tensor.device for tensor in tensors.values()} - {torch.device("cpu")}
    if len(devices) > 1:
        raise ValueError(
            f"the module is spread over {', '.join(sorted(map(str, devices)))}: each needs its own service"
        )


def _reach(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How many elements lie between a tensor's first and the end of its last."""
    if 0 in shape:
        return 0
    end = 1
    for size, step in zip(shape, stride, strict=True):
        end += (size - 1) * step
    return end


def _end(slot: Slot) -> int:
    """Where a slot's tensor ends in its storage, in elements. Raises ValueError for numbers that make no tensor."""
    if slot.storage_offset < 0 or len(slot.shape) != len(slot.stride) or any(n < 0 for n in slot.shape + slot.stride):
        raise ValueError(
            f"no tensor can have the shape {slot.shape} and stride {slot.stride} from {slot.storage_offset}"
        )
    return slot.storage_offset + _reach(slot.shape, slot.stride)


def _shared(manifest: Manifest, device: str) -> set[int]:
    """Where storages of Parameters lie that are used on the arena's kind of device; others must be copied over."""
    return {slot.offset for slot in manifest.parameters.values() if slot.device == device}


def _together(manifest: Manifest) -> dict[int, list[str]]:
    """The names of the tensors over each storage, by its offset."""
    together: dict[int, list[str]] = {}
    for name, slot in manifest.slots().items():
        together.setdefault(slot.offset, []).append(name)
    return together


def _outside(arena: Any, slot: Slot) -> ValueError:
    return ValueError(f"{slot.size_bytes} bytes at {slot.offset} lie outside of an allocation of {arena.numel()}")


def _stored(arena: Any, slot: Slot) -> Any:
    if slot.offset < 0 or slot.size_bytes < 0 or slot.offset + slot.size_bytes > arena.numel():
        raise _outside(arena, slot)
    return arena[slot.offset : slot.offset + slot.size_bytes]


def _visible(tensor: Any, slot: Slot) -> Any:
    """The part of a tensor's storage that is stored, as bytes."""
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    start = (tensor.storage_offset() - slot.storage_offset) * tensor.itemsize
    return storage[start : start + slot.size_bytes]


def _private(arena: Any, slot: Slot) -> Any:
    device = slot.device if slot.device != arena.device.type else arena.device
    return _stored(arena, slot).to(device, copy=True)


def _matches(module: Any, modules: dict[str, Any], manifest: Manifest, *, in_part: bool) -> None:
    known = {*manifest.slots(), *manifest.aliases}
    if strange := sorted(name for name in known if name.rpartition(".")[0] not in modules):
        raise ValueError(f"the shared weights hold {strange[0]}, for which this model has no place")
    if lost := sorted(name for name, stored in manifest.aliases.items() if stored not in manifest.slots()):
        raise ValueError(f"the shared weights tie {lost[0]} to something that they do not hold")
    wanted = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    if not in_part and (missing := sorted(wanted - known)):
        raise ValueError(f"the shared weights lack {len(missing)} parameters of this model, {missing[0]} among them")


def _put(owner: Any, leaf: str, kind: str, tensor: Any) -> None:
    persistent = leaf not in owner._non_persistent_buffers_set
    owner._parameters.pop(leaf, None)
    owner._buffers.pop(leaf, None)
    vars(owner).pop(leaf, None)
    if kind == "parameters":
        owner.register_parameter(leaf, tensor)
    elif kind == "buffers":
        owner.register_buffer(leaf, tensor, persistent=persistent)
    else:
        vars(owner)[leaf] = tensor


def _within(value: Any) -> Iterator[Any]:
    """The tensors in a value; a container that contains itself is looked into once."""
    waiting, seen = [value], set()
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, list | tuple | dict) and id(item) not in seen:
            seen.add(id(item))
            waiting += item.values() if isinstance(item, dict) else item


def _joined(prefix: str, leaf: str) -> str:
    return f"{prefix}.{leaf}" if prefix else leaf
