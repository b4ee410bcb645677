"""As SGLang's, with the arguments that the adapter gives."""

from __future__ import annotations

import argparse


def prepare_server_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sglang", usage="")
    for name in ("--model-path", "--served-model-name", "--dtype"):
        parser.add_argument(name, required=True)
    for name in ("--context-length", "--max-running-requests"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--enable-memory-saver", action="store_true")
    parser.add_argument("--tp-size", type=int, default=1)
    return parser.parse_args(argv)
