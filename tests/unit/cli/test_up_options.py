"""Options of ``up``: command line over environment over defaults, and sentences for what does not fit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.cli.errors import CliError
from app.cli.plan import UpOptions
from app.cli.up_options import parse_up


def test_defaults() -> None:
    assert parse_up([], {}) == UpOptions(run_dir=Path(os.path.abspath(".hotspare")))


def test_command_line() -> None:
    arguments = (
        "--pods 3 --engine=vllm --port 0 --base-port 9000 --run-dir /r --shadows 0 --no-gms --no-keeper --model /m"
    )
    assert parse_up(arguments.split(), {}) == UpOptions(
        pods=3,
        engine="vllm",
        model=Path("/m"),
        port=0,
        base_port=9000,
        run_dir=Path("/r"),
        shadows=0,
        gms=False,
        keeper=False,
    )


def test_environment_fills_what_the_command_line_leaves_open() -> None:
    environment = {"HOTSPARE_PODS": "4", "HOTSPARE_ENGINE": "sim", "HOTSPARE_GMS": "off", "HOTSPARE_PORT": ""}
    options = parse_up(["--pods", "2"], environment)
    assert (options.pods, options.engine, options.gms, options.port) == (2, "sim", False, 8000)
    assert parse_up(["--gms"], environment).gms


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        (["--podz", "2"], {}, "unknown option --podz; did you mean --pods?"),
        (["--bogus"], {}, "unknown option --bogus; see hotspare up --help"),
        (["--no-gsm"], {}, "unknown option --no-gsm; did you mean --no-gms?"),
        (["--frobnicate"], {}, "unknown option --frobnicate; see hotspare up --help"),
        (
            ["--api-key", "sk-1"],
            {},
            "unknown option --api-key: what up starts reads its settings from the environment; set HOTSPARE_API_KEYS",
        ),
        (
            ["--capacity=4"],
            {},
            "unknown option --capacity: what up starts reads its settings from the environment; set HOTSPARE_CAPACITY",
        ),
        (["--api-kez=sk-1"], {}, "unknown option --api-kez; see hotspare up --help"),
        (
            ["--engine", "sim", "--model", "/m"],
            {},
            "--model is for --engine vllm: the engine without a model has none; leave one of them out",
        ),
        (["now"], {}, "unexpected argument 'now'; see hotspare up --help"),
        (["--pods", "0"], {}, "argument --pods: '0' is not a whole number from 1 to 100"),
        (["--shadows", "8"], {}, "argument --shadows: '8' is not a whole number from 0 to 7"),
        (["--port", "-1"], {}, "argument --port: '-1' is not a whole number from 0 to 65535"),
        (["--port"], {}, "argument --port: expected one argument"),
        ([], {"HOTSPARE_PODS": "x"}, "HOTSPARE_PODS=x: argument --pods: 'x' is not a whole number from 1 to 100"),
        ([], {"HOTSPARE_KEEPER": "maybe"}, "HOTSPARE_KEEPER=maybe: should be true or false"),
    ],
)
def test_what_does_not_fit(arguments: list[str], environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(CliError) as caught:
        parse_up(arguments, environment)
    assert str(caught.value) == sentence
    assert caught.value.code == 2


def test_an_unknown_engine() -> None:
    with pytest.raises(CliError, match=r"--engine: there is no engine 'tgi' here; there are vllm, sim"):
        parse_up(["--engine", "tgi"], {})


def test_a_model_in_the_environment_does_not_disturb_the_engine_without_one() -> None:
    assert parse_up(["--engine", "sim"], {"HOTSPARE_MODEL": "/m"}).engine == "sim"


def test_ranks_are_what_the_variable_says_which_pods_read_too() -> None:
    assert parse_up([], {"HOTSPARE_TENSOR_PARALLEL_SIZE": "2"}).tensor_parallel_size == 2
    assert parse_up([], {"HOTSPARE_TENSOR_PARALLEL_SIZE": "many"}).tensor_parallel_size == 1  # theirs to refuse
    with pytest.raises(CliError, match="unknown option"):
        parse_up(["--tensor-parallel-size", "2"], {})
