"""The kernels compile for chips that are not here, alone and in whole steps, with no pool-sized temporary.

`scripts/check_kernels.py --compile` prints the same as a table.
"""

from typing import Any

import pytest

from scripts.kernels import aot_gpu, programs, report

pytestmark = [pytest.mark.aot, pytest.mark.timeout(7200)]

SPILLED = {"decode": 0, "prefill": 176}
"""Bytes stored and loaded on sm_90 up to head_dim 128: the 232 registers of a computing thread do not quite do."""


def compiled(target: str) -> list[dict[str, Any]]:
    missing = programs.missing_compiler(target)
    if missing is not None:
        pytest.skip(missing)
    return list(programs.compile_all(target, list(programs.programs(target))))


@pytest.mark.parametrize("target", programs.REQUIRED)
def test_everything_compiles_for_the_chips_that_must(target: str) -> None:
    rows = compiled(target)
    wrong = {row["name"]: row for row in rows if report.outcome(row) != "ok"}
    assert not wrong
    assert [row["name"] for row in rows] == list(programs.programs(target))
    if target == "sm_90":
        for row in rows:
            for kernel, used in row["kernels"].items():
                assert used["shared_memory"] <= aot_gpu.CHIPS[target].shared_memory_per_block, row
                assert "256" in row["name"] or used["spilled"] <= SPILLED[kernel], row


@pytest.mark.slow
@pytest.mark.parametrize("target", sorted(set(programs.TARGETS) - set(programs.REQUIRED)))
def test_the_main_shapes_compile_for_the_other_chips(target: str) -> None:
    wrong = [row for row in compiled(target) if row["name"] in programs.MAIN and report.outcome(row) != "ok"]
    assert not wrong
