"""``python -m app.cli.bench.echo SOCKET ASKED SIZE``: answers each ASKED bytes with SIZE bytes, through asyncio.

The least that a service on a Unix socket can do; what the memory service takes for its status is measured against it.
Says ``ready`` on stdout and ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import sys


async def _serve(path: str, asked: int, size: int) -> None:
    reply = bytes(size)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readexactly(asked)
                writer.write(reply)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the one client has hung up
        finally:
            writer.close()

    async with await asyncio.start_unix_server(answer, path):
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
