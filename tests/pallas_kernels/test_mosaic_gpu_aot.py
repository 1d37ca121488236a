"""The Mosaic GPU kernels compile for chips that are not here, with no pool-sized temporary and nothing spilled.

Each program has a process of its own.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.pallas_kernels.aot_gpu import CHIPS, ENVIRONMENT, missing_plugin
from tests.pallas_kernels.aot_gpu_programs import PROGRAMS

pytestmark = [pytest.mark.aot, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
SPILLED = {
    "prefill": 128
}  # bytes stored and loaded; the 232 registers of a computing thread do not quite do at head_dim 128
MAIN = ("decode-64", "decode-128", "decode-256", "prefill-64", "prefill-128")


@cache
def compiled(chip: str, name: str) -> dict[str, Any]:
    """What `aot_gpu_programs` says of a program, from a process of its own."""
    reason = missing_plugin()
    if reason is not None:
        pytest.skip(reason)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "tests.pallas_kernels.aot_gpu_programs", chip, name],
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", MAIN)
def test_main_shapes_compile_and_spill_next_to_nothing(name: str) -> None:
    for kernel, used in compiled("sm_90", name)["kernels"].items():
        assert used["spilled"] <= SPILLED.get(kernel, 0), kernel
        assert used["shared_memory"] <= CHIPS["sm_90"].shared_memory_per_block, kernel


def test_temporary_memory_does_not_grow_with_the_pool() -> None:
    small, large = (compiled("sm_90", f"layers-{size}-pool") for size in ("small", "large"))
    assert large["pool_bytes"] > 16 * small["pool_bytes"]
    assert large["temporary_bytes"] == small["temporary_bytes"]


@pytest.mark.parametrize(("name", "kernels"), [("model-decode", {"decode"}), ("model-prefill", {"decode", "prefill"})])
def test_whole_steps_of_the_model_compile(name: str, kernels: set[str]) -> None:
    row = compiled("sm_90", name)
    assert set(row["kernels"]) == kernels
    assert row["temporary_bytes"] < row["pool_bytes"] / 2, "the pool is copied"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - set(MAIN)))
def test_other_shapes(name: str) -> None:
    compiled("sm_90", name)


@pytest.mark.slow
@pytest.mark.parametrize("chip", sorted(set(CHIPS) - {"sm_90"}))
@pytest.mark.parametrize("name", [*MAIN, "prefill-256"])
def test_other_chips(chip: str, name: str) -> None:
    if name.endswith("256") and CHIPS[chip].capability in ("8.9", "12.0"):
        pytest.skip("refused by check(): a block has too little shared memory")
    compiled(chip, name)
