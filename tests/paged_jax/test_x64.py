"""The core tests once more, in a process where JAX makes 64-bit integers of sums and aranges."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("names", ["block_tables", pytest.param("page_pool cache", marks=pytest.mark.slow)])
def test_core_tests_pass_in_x64_mode(names: str) -> None:
    here = Path(__file__).parent
    files = [str(here / f"test_{name}.py") for name in names.split()]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n0",
        "-p",
        "no:cacheprovider",
        "-k",
        "not vmap and not refuses",
        *files,
    ]
    environment = os.environ | {"JAX_ENABLE_X64": "1"}
    done = subprocess.run(command, cwd=here.parents[1], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
