"""A case of `test_mosaic_gpu.py` in every run.

The interpreter runs each warpgroup in a thread that waits inside XLA. Where XLA has no more threads than warpgroups (it
takes as many as there are cores) it was seen to hang by itself. XLA reads their number from NPROC as it starts: hence a
process of its own, which a hang ends, too.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from scripts.check_kernels import XLA_THREADS

ROOT: Final = Path(__file__).parents[2]
CASES: Final = ("test_a_ring_that_wraps[prefill]",)  # decode rows beside a chunk


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sample_of_the_interpreted_contract() -> None:
    cases = [f"{ROOT}/tests/pallas_kernels/test_mosaic_gpu.py::{name}" for name in CASES]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", "-m", "slow", "--tb=short", *cases],
        env=os.environ | {"NPROC": str(XLA_THREADS)}, cwd=ROOT,
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    assert f"{len(CASES)} passed" in done.stdout, done.stdout[-6000:]
