from __future__ import annotations

import subprocess
import sys

import pytest

from app.cli.errors import CliError
from app.cli.flags import refuse_unknown_flags
from app.cli.launch import PASSED_ON
from app.cli.meanings import Process, parser_of


@pytest.mark.parametrize(
    ("command", "flag", "hint"),
    [
        ("pod", "--engien", "did you mean --engine?"),
        ("engine", "--admin-prot=8101", "did you mean --admin-port?"),
        ("gateway", "--max-inflihgt", "did you mean --max-inflight?"),
        ("gms", "--memory-limt", "did you mean --memory-limit?"),
        ("gateway", "--frobnicate", "see hotspare gateway --help"),
    ],
)
def test_a_misspelt_flag_is_told_with_the_one_that_was_meant(command: str, flag: str, hint: str) -> None:
    with pytest.raises(CliError) as refused:
        refuse_unknown_flags(command, [flag, "sim"])
    assert (str(refused.value), refused.value.code) == (f"unknown option {flag.partition('=')[0]}; {hint}", 2)


@pytest.mark.parametrize("command", PASSED_ON)
def test_every_flag_of_a_process_is_let_through_without_its_settings(command: str) -> None:
    flags = {flag for action in parser_of(Process(command))._actions for flag in action.option_strings}
    script = (
        "import sys; from app.cli.flags import refuse_unknown_flags as look; "
        f"look({command!r}, {sorted(flags)!r}); print(sorted({{'pydantic', 'argparse', 'difflib'}} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
