"""A small process in place of an engine or the memory service. Not a test; the supervisor under test starts it.

It says ``up PID`` when it is ready and ``term`` when it gets SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import repeat
from types import FrameType

from workers.lifeline import die_with_parent

TOLD: list[int] = []


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--live-port", type=int, help="answer every request here with 200")
    parser.add_argument(
        "--live-body", action="append", help="answer with this, once; then with the next one; then not at all"
    )
    parser.add_argument("--say", help="say this first")
    parser.add_argument("--exit", type=int, help="end with this code at once")
    parser.add_argument("--exit-after", type=int, default=10**9, help="... but only up to this life, see --lives")
    parser.add_argument("--lives", help="a file that gets a byte for each life")
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--stop-on-term", action="store_true", help="be stopped (SIGSTOP) instead of ending")
    parser.add_argument("--silent-on-term", action="store_true", help="run on, and answer nothing any more")
    parser.add_argument(
        "--grandchild",
        action="store_true",
        help="start a process that outlives this one, in the first life only: see --lives",
    )
    parser.add_argument("--chatty", action="store_true", help="write without end")
    options = parser.parse_args()

    life = 1
    if options.lives:
        with open(options.lives, "ab") as lives:
            lives.write(b".")
            life = lives.tell()
    die_with_parent(int(os.environ["HOTSPARE_PARENT_PID"]))
    if options.say:
        print(options.say, flush=True)
    if options.exit is not None and life <= options.exit_after:
        sys.exit(options.exit)
    signal.signal(signal.SIGTERM, ignored if options.ignore_term or options.silent_on_term else ended)
    if options.stop_on_term:
        signal.signal(signal.SIGTERM, stopped)
    if options.grandchild and life == 1:
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.alarm(60); signal.pause()"])
        print(f"grandchild {child.pid}", flush=True)
    server = listen(options.live_port) if options.live_port else None
    print(f"up {os.getpid()}", flush=True)
    if options.chatty:
        while True:
            sys.stdout.write("words without end " * 50 + "\n")
    if server is None:
        while True:
            signal.pause()
    bodies: Iterator[str] = iter(options.live_body) if options.live_body else repeat("")
    kept = []
    while True:
        connection, _ = server.accept()
        connection.recv(4096)
        print("asked", flush=True)
        body = next(bodies, None)
        if body is None or (options.silent_on_term and TOLD):
            kept.append(connection)  # whoever asked waits
            continue
        with connection:
            head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            connection.sendall((head + body).encode())


def listen(port: int) -> socket.socket:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", port))
    server.listen()
    return server


def ended(number: int, frame: FrameType | None) -> None:
    os.write(1, b"term %d\n" % time.monotonic_ns())
    os._exit(0)


def ignored(number: int, frame: FrameType | None) -> None:
    TOLD.append(number)
    os.write(1, b"term ignored\n")


def stopped(number: int, frame: FrameType | None) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    main()
