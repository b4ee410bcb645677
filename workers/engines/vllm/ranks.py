"""A further rank of a vLLM engine: its own process, worker, share of the weights and of the KV pages.

Whatever the core asks of its workers (``executor``) comes here as a step. Messages are pickled as vLLM's own between
its processes are; both ends are forks of one process.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence
from typing import Any

from workers.engine import EngineConfigError, EngineDeadError, MemoryLostError
from workers.engines.vllm import build
from workers.memory import MemoryService
from workers.ranks import MakeWorker
from workers.settings import EngineSettings
from workers.waits import Waits

logger = logging.getLogger(__name__)


class VllmRank:
    """Implements ``workers.ranks.RankWorker``. vLLM is imported already: the keeper has done it."""

    def __init__(self, rank: int, service: MemoryService | None) -> None:
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        self._rank = rank
        self._service = service
        self._wrapper: Any = WorkerWrapperBase(rpc_rank=rank)
        self._config: Any = None

    @property
    def waits(self) -> Waits | None:
        waits: Waits | None = self._wrapper.hotspare_waits() if self._config is not None else None
        return waits

    def attach(self) -> None:
        from workers.engines.vllm.executor import load_worker

        load_worker(self._wrapper, self._config)

    def map(self, *, epoch: int) -> None:
        self._wrapper.kv_map(epoch)

    def unmap(self) -> None:
        self._wrapper.kv_unmap()

    def step(self, work: bytes) -> bytes:
        from vllm.v1.serial_utils import run_method

        from workers.engines.vllm.executor import BEGIN, finished, to_tell

        method, args, kwargs = pickle.loads(work)  # noqa: S301 - see above
        if method == BEGIN:
            self._begin(*args)
            return pickle.dumps(None)
        self.check()
        return pickle.dumps(to_tell(finished(run_method(self._wrapper, method, args, kwargs))))

    def check(self) -> None:
        lost = self._wrapper.hotspare_lost() if self._config is not None else None
        if lost is not None:
            raise MemoryLostError(lost)

    def close(self) -> None:
        if self._config is not None:
            self._wrapper.shutdown()

    def _begin(self, config: Any, rendezvous: str) -> None:
        from workers.engines.vllm.arguments import Placement
        from workers.engines.vllm.executor import begin_worker

        if self._config is not None:
            raise EngineDeadError(f"rank {self._rank} was begun twice")
        if self._service is not None:
            config.load_config.model_loader_extra_config = Placement(service=self._service).to_config()
        begin_worker(self._wrapper, config, rendezvous, rank=self._rank)
        self._config = config


def make_rank(settings: EngineSettings, services: Sequence[MemoryService]) -> MakeWorker:
    """The factory that ``workers.ranks`` calls in the rank's process. ``services``: one a rank, or none at all.

    Raises:
        EngineConfigError: on GPUs nobody has tried it.
    """
    if build.on_gpu(settings.device):
        raise EngineConfigError(
            "vLLM engines of several ranks are for CPUs in this version: set HOTSPARE_TENSOR_PARALLEL_SIZE to 1 "
            "(docs/gpu.md)"
        )

    def make(rank: int, others: Sequence[int]) -> VllmRank:
        return VllmRank(rank, services[rank].fenced_with(others) if services else None)

    return make
