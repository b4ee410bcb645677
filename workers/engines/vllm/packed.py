"""Matrices as oneDNN has packed them, once for all engines of a pod.

On a CPU vLLM multiplies with oneDNN, which copies every matrix into a form of its own, in memory of its own: about
twice as fast at decoding, and a second copy of the weights in each engine. Here that copy is shared. The writer of the
weights lets vLLM pack, finds the memory that each packed matrix came to lie in, and stores it as one more Parameter of
the layer. Every engine then has the service's pages at that place instead of its own (``WeightsMemory.mirror``). A
reader has oneDNN pack a matrix of zeros first, which gives it a handler and a place of the same form. What the writer's
handler answered to a given input is stored too, and a reader whose handler does not answer the same is refused.

Memory is found by what is new in the process's address space: while weights are loaded, the C library is told to give
each large block a mapping of its own. A matrix whose memory is not found in this way stays unpacked, which vLLM itself
provides for.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
import vllm._custom_ops as custom_ops
import vllm.model_executor.layers.utils as layer_utils

from workers.engine import EngineDeadError
from workers.engines.vllm.new_memory import Stretch, anonymous, only_new
from workers.weights import WeightsMemory

logger = logging.getLogger(__name__)

PACKED: Final = "hotspare_packed"
"""Parameter of a layer: the memory of its packed matrix, from page to page, uint8."""
ASKED: Final = "hotspare_asked"
ANSWERED: Final = "hotspare_answered"
"""Buffers of a layer: an input of [K], and what the packed [K, N] matrix makes of it, [N]. Their sizes are its form."""

_SMALLEST_BYTES: Final = 64 << 10
"""Smaller blocks get no mapping of their own, and matrices of that size are not worth one."""
_TRIES: Final = 3
_TRIAL: Final = (320, 192)
_LARGE_BYTES: Final = 32 << 20
"""glibc's largest threshold when it adapts by itself, as it did before it was told; the other one is twice it then."""
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3


class Handler(NamedTuple):
    """One packed matrix."""

    dnnl: Any
    place: Stretch


def usable() -> bool:
    """Whether this vLLM packs with oneDNN here, and where it packs to can be found."""
    if not custom_ops._supports_onednn:
        return False
    n, k = _TRIAL
    matrix = _input(n * k, torch.float32).reshape(n, k)  # no draw from the generator that answers are drawn from
    try:
        with recording() as packed:
            dnnl = custom_ops.create_onednn_mm(matrix.t(), 1)
    except RuntimeError as error:
        logger.info("weights: matrices stay as they are, unpacked: %s", error)
        return False
    asked = _input(k, torch.float32)
    return _pointer(dnnl) in packed and torch.allclose(_answer(dnnl, asked), matrix @ asked, rtol=1e-3, atol=1e-3)


@contextmanager
def recording() -> Iterator[dict[int, Handler]]:
    """While it lasts, vLLM packs with oneDNN, and only matrices whose memory is found. Yields them, by the pointer that
    vLLM knows a handler by."""
    create, small = custom_ops.create_onednn_mm, layer_utils.check_cpu_sgl_kernel
    packed: dict[int, Handler] = {}

    def create_and_find(weight: Any, primitive_cache_size: int = 128) -> Any:
        handler = _create(create, weight, primitive_cache_size)
        packed[_pointer(handler.dnnl)] = handler
        return handler.dnnl

    custom_ops.create_onednn_mm = create_and_find
    layer_utils.check_cpu_sgl_kernel = _never
    try:
        with _large_blocks_apart():
            yield packed
    finally:
        custom_ops.create_onednn_mm, layer_utils.check_cpu_sgl_kernel = create, small


@contextmanager
def unpacked() -> Iterator[None]:
    """While it lasts, vLLM chooses kernels that compute on weights as they lie in memory. It has no setting for it."""
    supported, small = custom_ops._supports_onednn, layer_utils.check_cpu_sgl_kernel
    custom_ops._supports_onednn, layer_utils.check_cpu_sgl_kernel = False, _never
    try:
        yield
    finally:
        custom_ops._supports_onednn, layer_utils.check_cpu_sgl_kernel = supported, small


def note(model: Any, packed: dict[int, Handler]) -> dict[str, Handler]:
    """For the writer, once vLLM has packed: give each such layer what readers need of it. Returns the handlers by the
    layers' names."""
    noted: dict[str, Handler] = {}
    tied: dict[tuple[int, Any], Any] = {}  # layers over one weight are packed apart, to the same
    for name, layer in model.named_modules():
        handler = packed.get(_pointer(_dnnl_of(layer)))
        if handler is None:
            continue
        asked = _input(handler.dnnl.k, layer.weight.dtype)
        block = _bytes_at(handler.place)
        if layer.weight.numel():
            block = tied.setdefault((layer.weight.data_ptr(), layer.weight.shape), block)
        layer.register_parameter(PACKED, torch.nn.Parameter(block, requires_grad=False))
        layer.register_buffer(ASKED, asked, persistent=False)
        layer.register_buffer(ANSWERED, _answer(handler.dnnl, asked), persistent=False)
        noted[name] = handler
    return noted


def share(model: Any, noted: dict[str, Handler], weights: WeightsMemory) -> None:
    """For the writer, once it has committed: the service's pages instead of its own.

    Raises:
        ValueError: they do not answer as its own did.
    """
    for name, handler in noted.items():
        _mirror(name, model.get_submodule(name), handler, weights)


def install(model: Any, weights: WeightsMemory) -> None:
    """For a reader, once its tensors are there: each packed layer's handler, over the service's pages.

    Raises:
        ValueError: this process packs in another way than the writer did.
        EngineDeadError: where it packed to was not to be seen; the next process may see it.
    """
    handlers: dict[int, Handler] = {}
    for name, layer in model.named_modules():
        stored = layer._parameters.get(PACKED)
        if stored is None:
            continue
        handler = handlers.get(stored.data_ptr())
        if handler is None:
            k, n = layer._buffers[ASKED].numel(), layer._buffers[ANSWERED].numel()
            handler = handlers[stored.data_ptr()] = _handler_for_zeros(name, k, n, layer._buffers[ASKED].dtype)
            _mirror(name, layer, handler, weights)
        layer.cpu_linear = _linear(handler.dnnl)


def _handler_for_zeros(name: str, k: int, n: int, dtype: Any) -> Handler:
    with recording() as packed:
        zeros = torch.zeros(n, k, dtype=dtype)
        try:
            dnnl = custom_ops.create_onednn_mm(zeros.t(), 32)
        except RuntimeError as error:  # the writer's was found, so this may be another time
            raise EngineDeadError(f"the packed weights of {name} cannot be shared this time: {error}") from error
    return packed[_pointer(dnnl)]


def _mirror(name: str, layer: Any, handler: Handler, weights: WeightsMemory) -> None:
    stored = layer._parameters[PACKED]
    place = handler.place
    if stored.numel() != place.end - place.start:
        raise _differs(name, f"{place.end - place.start} bytes instead of {stored.numel()}")
    head = ctypes.sizeof(ctypes.c_size_t) * 2  # the C library's own, which says how the block is given back
    if ctypes.string_at(place.start, head) != ctypes.string_at(stored.data_ptr(), head):
        raise _differs(name, "the memory is another library's")
    weights.mirror(stored.data_ptr(), stored.numel(), place.start)
    asked, answered = layer._buffers[ASKED], layer._buffers[ANSWERED]
    close = 1e-4 if asked.dtype is torch.float32 else 1e-2
    if not torch.allclose(_answer(handler.dnnl, asked), answered, rtol=close, atol=close):
        raise _differs(name, "what it multiplies to")


def _differs(name: str, how: str) -> ValueError:
    return ValueError(
        f"the packed weights of {name} cannot be shared: this process packs in another way than the one that wrote "
        f"them ({how}); end all engines of the pod and its memory service, or run it with HOTSPARE_GMS=false"
    )


def _create(create: Callable[[Any, int], Any], weight: Any, cache_size: int) -> Handler:
    """Raises RuntimeError, for which vLLM has a kernel that does not pack: the matrix is small, or where it came to lie
    is not seen, as another thread got memory meanwhile, or the block was a free one."""
    size = weight.numel() * weight.itemsize
    if size < _SMALLEST_BYTES:
        raise RuntimeError(f"a matrix of {size} bytes is not worth it")
    kept = []
    for _ in range(_TRIES):
        before = anonymous()
        dnnl = create(weight, cache_size)
        place = only_new(before, anonymous(), size)
        if place is not None:
            return Handler(dnnl, place)
        kept.append(dnnl)  # it has the free block now
    raise RuntimeError(f"the memory of a packed matrix of {size} bytes is not to be seen")


@contextmanager
def _large_blocks_apart() -> Iterator[None]:
    """Each block of 64 KiB and more has a mapping of its own, unless it is a free one within others."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, _SMALLEST_BYTES)
    try:
        yield
    finally:
        libc.mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
        libc.mallopt(_TRIM_THRESHOLD, 2 * _LARGE_BYTES)


def _never(n: int, k: int, dtype: Any) -> bool:
    """In place of vLLM's ``check_cpu_sgl_kernel``: those kernels pack as well, and where to is not to be found."""
    return False


def _linear(dnnl: Any) -> Callable[[Any, Any, Any], Any]:
    """As vLLM's own ``dispatch_cpu_unquantized_gemm`` makes it."""
    return lambda x, weight, bias: custom_ops.onednn_mm(dnnl, x, bias)


def _dnnl_of(layer: Any) -> Any:
    """The handler in the function that vLLM gave this layer, or None."""
    cells = getattr(getattr(layer, "cpu_linear", None), "__closure__", None) or ()
    held = (cell.cell_contents for cell in cells)
    return next((one for one in held if isinstance(one, custom_ops.CPUDNNLGEMMHandler)), None)


def _pointer(dnnl: Any) -> int:
    return int(dnnl.handler_tensor.item()) if dnnl is not None else 0


def _input(k: int, dtype: Any) -> Any:
    return torch.linspace(-1, 1, k).to(dtype)


def _answer(dnnl: Any, asked: Any) -> Any:
    return custom_ops.onednn_mm(dnnl, asked.unsqueeze(0), None).squeeze(0)


def _bytes_at(place: Stretch) -> Any:
    block = (ctypes.c_ubyte * (place.end - place.start)).from_address(place.start)
    return torch.frombuffer(block, dtype=torch.uint8)
