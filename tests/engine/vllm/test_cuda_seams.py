"""What an engine on a GPU relies on in vLLM, looked up in the sources that are installed: any build has them.

They cannot be run here. So what was read in them, and is relied on, is looked for again: a vLLM that moved it is
noticed before anybody with a GPU does.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from workers.engines.vllm import build

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[3]
WORKER = "vllm/v1/worker/gpu_worker.py"
RUNNER = "vllm/v1/worker/gpu_model_runner.py"


def body(path: str) -> ast.Module:
    return ast.parse(Path(str(metadata.distribution(build.CPU_DISTRIBUTION).locate_file(path))).read_text())


def found(path: str, name: str) -> ast.AST:
    """A function, or a method as ``Class.name``."""
    node: ast.AST = body(path)
    for part in name.split("."):
        (node,) = (
            inner
            for inner in ast.iter_child_nodes(node)
            if isinstance(inner, ast.ClassDef | ast.FunctionDef) and inner.name == part
        )
    return node


def calls(node: ast.AST) -> Iterator[ast.Call]:
    return (inner for inner in ast.walk(node) if isinstance(inner, ast.Call))


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, where ``vllm`` is vLLM's."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=220, check=False
    )


def test_after_a_wake_there_is_nothing_to_mend_but_what_vllm_took_away_itself() -> None:
    """Its pools, which are refused here, and weights and buffers that it had saved. A new hook would be another
    call."""
    called = {ast.unparse(call.func) for call in calls(found(WORKER, "Worker.wake_up"))}
    assert called == {
        "self.sleep_mode_backend.resume",
        "resume_device_comms",
        "self._restore_sleep_parameters",
        "model.named_buffers",
        "buffer.data.copy_",
        "self.get_draft_model",
        "draft.named_buffers",
        "len",
        "self.synchronize_device",
    }
    runner = found(RUNNER, "GPUModelRunner")
    methods = {inner.name for inner in ast.iter_child_nodes(runner) if isinstance(inner, ast.FunctionDef)}
    assert not [name for name in methods if "wake" in name or "kv_scales" in name]


def test_the_kv_cache_is_one_allocation_that_is_answered_from_the_range() -> None:
    allocated = [ast.unparse(call) for call in calls(found("vllm/v1/worker/utils.py", "allocate_kv_cache"))]
    assert [call for call in allocated if call.startswith("torch.")] == [
        "torch.zeros(buf_size, dtype=torch.int8, device=device)"
    ]
    around = [ast.unparse(call) for call in calls(found(WORKER, "Worker.initialize_from_config"))]
    assert "self._maybe_get_memory_pool_context(tag='kv_cache')" in around


def test_a_dummy_run_writes_to_no_slot() -> None:
    assert "sm.fill_(-1)" in {ast.unparse(call) for call in calls(found(RUNNER, "GPUModelRunner._dummy_run"))}


def test_with_a_size_that_is_set_free_memory_is_not_measured() -> None:
    """One run of the model, which compiles it, and the size comes back."""
    (branch,) = (
        node
        for node in ast.walk(found(WORKER, "Worker.determine_available_memory"))
        if isinstance(node, ast.If) and "kv_cache_memory_bytes" in ast.unparse(node.test)
    )
    called = [ast.unparse(call.func) for part in branch.body for call in calls(part)]
    assert "self.model_runner.profile_run" in called
    assert "memory_profiling" not in called
    assert ast.unparse(branch.body[-1]).startswith("return reserve_mm_ipc_gpu_memory(kv_cache_memory_bytes")


CLASSES = """
from workers.engines.vllm import compat
compat.prepare_environment("cpu:0")
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.utils import request_memory
from workers.engines.vllm import cuda_worker

assert [problem for seam in compat.GPU_SEAMS if (problem := compat._problem(*seam))] == []

ours = cuda_worker.GmsCudaWorker
for name in ("reserve_kv", "kv_scratch", "kv_map", "kv_unmap", "_maybe_get_memory_pool_context", "execute_dummy_batch"):
    assert getattr(ours, name).__module__ == "workers.engines.vllm.worker", name
assert ours._make_model_runner.__qualname__.startswith("ResumedCudaWorker")
assert cuda_worker.ResumedCudaRunner._update_states.__qualname__.startswith("ResumedBatch")
for name in ("determine_available_memory", "compile_or_warm_up_model", "initialize_from_config"):
    assert getattr(ours, name) is getattr(Worker, name), name  # vLLM's own

class Snapshot:
    total_memory, free_memory, device_ = 100 << 30, 1 << 28, "cuda:0"

class Cache:
    gpu_memory_utilization = 0.001

assert request_memory(Snapshot, Cache) < 1 << 28  # on a GPU that is full, a shadow may start
Cache.gpu_memory_utilization = 0.92
try:
    request_memory(Snapshot, Cache)
except ValueError as error:
    assert "less than desired" in str(error)
else:
    raise AssertionError("vLLM asks no more for free memory: arguments._ON_GPU has no purpose")
"""


def test_classes_fit_into_vllms() -> None:
    done = run(CLASSES)
    assert done.returncode == 0, done.stderr


ARGUMENTS = """
import sys
from pathlib import Path
from workers.engine import EngineConfigError
from workers.engines.vllm import arguments, compat
from workers.settings import EngineSettings

compat.prepare_environment("cpu:0")
settings = EngineSettings(engine="vllm", run_dir=sys.argv[1])

def parsed(device, *more):
    # Not validated again: here is no build for GPUs, whose arguments are the same.
    return arguments.parse(settings.model_copy(update={"device": device, "engine_args": more}), Path("/model"))

gpu = parsed("cuda:0")
assert (gpu.enforce_eager, gpu.async_scheduling, gpu.gpu_memory_utilization) == (False, False, 0.001)
assert parsed("cuda:0", "--async-scheduling", "--enforce-eager").async_scheduling is True
assert parsed("cpu:0").enforce_eager is True
for flag in ("--enable-sleep-mode", "--enable-cumem-allocator"):
    try:
        parsed("cuda:0", flag)
    except EngineConfigError as error:
        assert f"engine_args must not hold {flag}" in str(error)
    else:
        raise AssertionError(flag)
"""


def test_what_vllm_is_told_on_a_gpu(tmp_path: Path) -> None:
    done = run(ARGUMENTS, str(tmp_path))
    assert done.returncode == 0, done.stderr


SCALES = """
from workers.engines.vllm import compat
compat.prepare_environment("cpu:0")
import os
import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.utils import weights_already_processed
from gms import tensors
from gms.mapping import Chunk, Reservation
from workers.engines.vllm.loader import check_shareable

class Attention(torch.nn.Module):
    kv_cache_dtype = "fp8"
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(8, 8), requires_grad=False)
        for name in ("_k_scale", "_v_scale", "_q_scale", "_prob_scale"):
            self.register_buffer(name, torch.ones(()))
        self._k_scale_cpu, self._v_scale_cpu = torch.ones(()), torch.ones(())
        self.quant_method = BaseKVCacheMethod(None)
        self.quant_method.create_weights(self)

def names(module):
    return {name for name, _ in module.named_parameters()}

writer = Attention()
for scale, value in ((writer.k_scale, 0.5), (writer.v_scale, 0.25), (writer.q_scale, 2.0), (writer.prob_scale, 1.0)):
    scale.data.fill_(value)
assert "k_scale" in names(writer)
writer.quant_method.process_weights_after_loading(writer)
assert names(writer) == {"weight"}  # scales were Parameters, and are buffers now
check_shareable(writer)
manifest, stored = tensors.plan(writer, tag="weights")
fd = os.memfd_create("weights")
os.truncate(fd, 1 << 20)
chunk = Chunk(fd, 1 << 20)
place = Reservation(1 << 20)
place.map([chunk], writable=True)
tensors.pack(manifest, stored, tensors.arena(place))

with torch.device("meta"):
    reader = Attention()
shared = Reservation(1 << 20)
shared.map([chunk], writable=False)
tensors.install(reader, manifest, tensors.arena(shared), in_part=True)
assert sorted(tensors.unfilled(reader)) == ["k_scale", "prob_scale", "q_scale", "v_scale"]
with weights_already_processed():
    reader.quant_method.process_weights_after_loading(reader)
assert tensors.unfilled(reader) == [] and names(reader) == {"weight"}
assert (reader._k_scale_float, reader._v_scale_float, reader._q_scale_float) == (0.5, 0.25, 2.0)
inside = range(shared.address, shared.address + shared.size_bytes)
assert reader.weight.data_ptr() in inside
for buffer in reader.buffers():
    assert buffer.data_ptr() not in inside
    buffer.fill_(1.0)  # its own, for whoever wants to write it

class Repacking(QuantizeMethodBase):
    def create_weights(self, layer, *weight_args, **extra_weight_attrs): ...
    def apply(self, layer, *args, **kwargs): ...

writer.layer = torch.nn.Linear(2, 2)
writer.layer.quant_method = Repacking()
try:
    check_shareable(writer)
except ValueError as error:
    assert "the weights of layer cannot be shared: vLLM's Repacking does not take" in str(error), error
else:
    raise AssertionError("a method that cannot skip its work was let pass")
"""


def test_scales_of_an_fp8_cache_are_each_engines_own_and_what_cannot_be_finished_is_refused() -> None:
    """With vLLM's own method, which runs on any device."""
    done = run(SCALES)
    assert done.returncode == 0, done.stderr


IMPORTS = """
import importlib, sys
from workers.engines.vllm import compat, preload
compat.prepare_environment("cuda:0")
import torch

def parts():
    return torch.cuda.Event, torch.cuda.Stream, torch.accelerator.synchronize, torch.Tensor.pin_memory

kept = parts()
for module in (*preload._MODULES, *preload._GPU_MODULES):
    importlib.import_module(module)
assert parts() == kept
print([name for name in sys.modules if name.startswith("vllm.v1.worker.cpu")])
"""


def test_nothing_that_is_imported_for_a_gpu_replaces_parts_of_torch() -> None:
    """vLLM's modules for CPUs do."""
    done = run(IMPORTS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
