"""The TPU kernel compiles for chips that are not here, and nothing in it or around it is the size of the pool."""

from importlib.util import find_spec

import pytest

from tests.pallas_kernels import aot_tpu

pytestmark = [
    pytest.mark.aot,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu, TPU's compiler, is not installed"),
]


@pytest.mark.parametrize("name", aot_tpu.SHAPES)
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_compiles_without_a_temporary_pool(chip: str, name: str) -> None:
    (found,) = aot_tpu.run(chip, [name], timeout=3000)
    assert found["pool_copies"] == found["half"]["pool_copies"] == 0
    assert found["temporary_bytes"] <= found["half"]["temporary_bytes"] + 4096, found


@pytest.mark.parametrize("chip", ["v4", "v5p", "tpu7x"])
def test_other_chips(chip: str) -> None:
    for found in aot_tpu.run(chip, list(aot_tpu.SHAPES), timeout=3000):
        assert found["pool_copies"] == 0, found
