"""Who runs vLLM's workers: the one in the core's thread and, of several ranks, one in each further rank's process.

vLLM takes a class here and gives it nothing but its config, which must not hold what differs between the engines of a
pair; so the classes are made where the rest is known.

vLLM's own executor of several ranks would spawn processes that are neither forked from what is preloaded nor fenced
with the engine. Here every call goes to all ranks at the same time, as there, and each of them takes part in every
step. Two things are looked at on the way: whether all ranks live, and whether they sampled the same tokens. Each rank
goes on from its own, so that if they differ, what is in the KV pages belongs to no text at all.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing import Lock
from pathlib import Path
from typing import Any, Final

import cloudpickle
from vllm.distributed import parallel_state
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

from gms.client import GmsError
from workers.engine import EngineDeadError
from workers.engines.vllm import exchange
from workers.ranks import ANSWER_SECONDS, Attach, Check, Ranks, Step

logger = logging.getLogger(__name__)

CHECK_SECONDS: Final = 5.0
"""A rank that has nothing else to do answers at once; the machine may be busy."""
BEGIN: Final = "hotspare_begin"
"""The first call to a rank: the config and the rendezvous file."""


def executor_in(runtime_dir: Path, local_rank: int) -> type[UniProcExecutor]:
    """One worker in the core's thread, on the device of number ``local_rank``."""

    class Executor(UniProcExecutor):
        def _distributed_args(self) -> tuple[str, int, int]:
            """Its rendezvous file lies in the runtime folder, not in the system's temp folder."""
            return f"file://{runtime_dir}/rendezvous", 0, local_rank

        def map_pages(self, epoch: int) -> None:
            self.driver_worker.kv_map(epoch)

    return Executor


def executor_over(
    ranks: Ranks,
    runtime_dir: Path,
    *,
    load_seconds: float,
    call_seconds: float,
    map_seconds: float,
    wait_seconds: float,
) -> type[UniProcExecutor]:
    """Rank 0 in the core's thread, the others where they are. The seconds are what a rank may take to load its part of
    the model, to map its pages, beside its waits for the memory service, and to do anything else."""

    class Executor(UniProcExecutor):
        def _init_executor(self) -> None:
            prefix = exchange.prefix(runtime_dir)
            exchange.forget(prefix)  # of a life that was killed while it started
            rendezvous = f"file://{runtime_dir}/{prefix}{os.getpid()}"
            work = cloudpickle.dumps((BEGIN, (self.vllm_config, rendezvous), {}))
            self.driver_worker = WorkerWrapperBase(rpc_rank=0)

            def begin() -> None:
                begin_worker(self.driver_worker, self.vllm_config, rendezvous, rank=0)

            ranks.ask(Step(work), timeout_seconds=load_seconds, meanwhile=begin)

            def load() -> None:
                load_worker(self.driver_worker, self.vllm_config, connected=lambda: exchange.forget(prefix))

            ranks.ask(Attach(), timeout_seconds=load_seconds, meanwhile=load)

        def map_pages(self, epoch: int) -> None:
            """The pages of all ranks, or none; those of rank 0 last, for the index beside them speaks of all."""
            ranks.ask(Check(), timeout_seconds=ANSWER_SECONDS)  # one that is stopped is not waited for as a service is
            try:
                told = ranks.ask(
                    Step(cloudpickle.dumps(("kv_map", (epoch,), {}))),
                    timeout_seconds=map_seconds,
                    wait_seconds=wait_seconds,
                    waits=self.driver_worker.hotspare_waits(),
                )
                self.driver_worker.kv_map(epoch, [pickle.loads(data) for data in told])  # noqa: S301 - see below
            except GmsError:
                self._on_all("kv_unmap", None, (), {}, False)
                raise

        def check_health(self) -> None:
            """Whether every rank answers, and may go on."""
            ranks.ask(Check(), timeout_seconds=CHECK_SECONDS)

        def collective_rpc(
            self,
            method: str | Callable[..., Any],
            timeout: float | None = None,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
            non_block: bool = False,
            single_value: bool = False,
        ) -> Any:
            if not non_block:
                return self._on_all(method, timeout, args, kwargs or {}, single_value)
            future: Future[Any] = Future()
            try:
                future.set_result(self._on_all(method, timeout, args, kwargs or {}, single_value))
            except Exception as error:
                future.set_exception(error)
            return future

        def _on_all(
            self,
            method: str | Callable[..., Any],
            timeout: float | None,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            single_value: bool,
        ) -> Any:
            results: list[Any] = []

            def own() -> None:
                results.append(finished(run_method(self.driver_worker, method, args, kwargs)))

            work = cloudpickle.dumps((method, args, kwargs))
            told = ranks.ask(Step(work), timeout_seconds=timeout or call_seconds, meanwhile=own)
            result, others = results[0], [pickle.loads(data) for data in told]  # noqa: S301 - from our own forks
            if isinstance(result, ModelRunnerOutput):
                agree(result.sampled_token_ids, others)
            return result if single_value else [result, *others]

    return Executor


# --- on every rank


def begin_worker(wrapper: Any, config: Any, rendezvous: str, *, rank: int) -> None:
    """Make the worker; it is not connected with the others yet."""
    arguments = {
        "vllm_config": config,
        "local_rank": rank,
        "rank": rank,
        "distributed_init_method": rendezvous,
        "is_driver_worker": rank == 0,
        "shared_worker_lock": Lock(),
    }
    wrapper.init_worker([{} if other != rank else arguments for other in range(rank + 1)])


def load_worker(wrapper: Any, config: Any, *, connected: Callable[[], None] = lambda: None) -> None:
    """Connect with the other ranks, and load this one's part of the model. ``connected`` is called in between."""
    with _without_queue():
        wrapper.init_device()
    connected()
    wrapper.load_model()
    current_platform.update_block_size_for_backend(config)


@contextmanager
def _without_queue() -> Iterator[None]:
    """vLLM makes each group of ranks a queue in shared memory, for objects that one tells the others; nothing does so
    here. Its 24 MiB have a random name, which nobody could remove after a SIGKILL."""
    made = parallel_state.init_model_parallel_group

    def make(*args: Any, **kwargs: Any) -> Any:
        return made(*args, **{**kwargs, "use_message_queue_broadcaster": False})

    parallel_state.init_model_parallel_group = make
    try:
        yield
    finally:
        parallel_state.init_model_parallel_group = made


def finished(result: Any) -> Any:
    """What a worker's method gave, once it is there."""
    return result.get_output() if isinstance(result, AsyncModelRunnerOutput) else result


def to_tell(result: Any) -> Any:
    """What rank 0 needs of another rank's result: of a step, the tokens."""
    return result.sampled_token_ids if isinstance(result, ModelRunnerOutput) else result


def agree(tokens: Sequence[Sequence[int]], others: Sequence[Any]) -> None:
    """Raises:
    EngineDeadError: the ranks are not in step any more.
    """
    for rank, told in enumerate(others, start=1):
        if told != tokens:
            raise EngineDeadError(f"rank {rank} sampled other tokens than rank 0 did in the same step")
