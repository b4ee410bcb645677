"""A client that keeps what it holds in custody, told what to do as `tests.process.gms.agent` is."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from typing import Any

from gms.client import GmsClient, GmsError
from gms.custody import Custody
from tests.process.gms.agent import Agent


class Holder(Agent):
    """`connect`, `attach`, `allocate` or `export`, `map`, `commit`, and then `keep`: the connection is the custody's
    from then on, and for another pool one has to `connect` again."""

    def __init__(self, socket_path: str, device: str, engine: str) -> None:
        super().__init__(socket_path, device, engine)
        self._custody: dict[str, Custody] = {}

    def keep(self, pool: str) -> None:
        if self._client is None:
            raise RuntimeError("there is no connection to keep")
        pages = [allocation for (name, _), allocation in self._pages.items() if name == pool]
        dial = partial(
            GmsClient.connect,
            self._path,
            engine=self._engine,
            instance="test",
            device=self._memory.device,
            device_id=self._memory.device_id,
            timeout_seconds=5.0,
            retry_seconds=0.0,
        )
        self._custody[pool] = Custody(self._client, self._leases.pop(pool), pages, dial=dial)
        self._client = None

    def custody(self, pool: str) -> dict[str, Any]:
        state = self._custody[pool].state()
        return {"phase": state.phase, "restored": state.restored, "reason": state.reason}

    def verify_kept(self, pool: str) -> int:
        """As `verify`, over the lease that stands now."""
        lease = self._custody[pool].lease
        return lease.verify(digests=self._digests(lease, lease.manifest))

    def close(self) -> None:
        for custody in self._custody.values():
            custody.close()
        super().close()


def main() -> None:
    holder = Holder(*sys.argv[1:4])
    try:
        for line in sys.stdin:
            name, arguments = json.loads(line)
            try:
                answer: object = [getattr(holder, name)(**arguments)]
            except GmsError as error:
                answer = {"code": error.code, "message": str(error), "retryable": error.retryable}
            os.write(1, json.dumps(answer).encode() + b"\n")
    finally:
        holder.close()


if __name__ == "__main__":
    main()
