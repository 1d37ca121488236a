"""check_kernels: what it judges and reports, and the whole device check in sizes that a CPU computes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from scripts import check_kernels
from scripts.kernels import children, device, programs, report
from scripts.kernels.timings import Shape

GOOD = {
    "name": "decode-32/8-128", "kernels": {"decode": {"registers": 100, "spilled": 0, "shared_memory": 1000}},
    "temporary_bytes": 10_000, "double_pool_temporary_bytes": None, "pool_bytes": 1_000_000, "pool_copies": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"double_pool_temporary_bytes": 19_000}, None),
        ({"kernels": {}}, "no kernel"),
        ({"pool_copies": 2}, "2 copies of the pool"),
        ({"temporary_bytes": 900_000}, "beside a pool"),
        ({"double_pool_temporary_bytes": 21_000}, "grows with the pool"),
    ],
)
def test_what_is_wrong_with_a_program_that_compiled(changes: dict[str, Any], message: str | None) -> None:
    found = programs.problem({**GOOD, **changes})
    assert found is None if message is None else message in found


def test_a_required_failure_fails_and_the_others_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(command: list[str], names: list[str], **_: Any) -> Iterator[dict[str, Any]]:
        for name in names:
            broken = name == "model-decode" and command[-1] in failing
            yield {"name": name, "error": "MosaicError: no\nlayout | at all"} if broken else {**GOOD, "name": name}

    monkeypatch.setattr(children, "rows", rows)
    monkeypatch.setattr(programs, "missing_compiler", lambda _: None)
    failing = ["sm_80"]
    assert check_kernels.main(["--compile", "sm_80", "sm_90", "v5e", "--main"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "compile: 11 of 12 programs for sm_80 sm_90 v5e; 0 required ones failed"
    assert "| sm_80 | model-decode | - | MosaicError: no layout / at all | - | - | - | - |" in lines
    assert "| sm_90 | decode-32/8-128 | decode | ok | 100 | 0 | 1,000 | 10,000 |" in lines
    failing = ["sm_90", "v5e"]
    assert check_kernels.main(["--compile", "sm_90", "v5e"]) == 1
    summary = capsys.readouterr().out.splitlines()[-1]
    assert summary.endswith("2 required ones failed: sm_90 model-decode, v5e model-decode")


def test_interpretation_passes_if_every_suite_does(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for codes in ([0, 0], [0, 1], [2, 0]):
        left = iter(codes)
        monkeypatch.setattr(subprocess, "run", lambda *_, left=left, **__: subprocess.CompletedProcess([], next(left)))
        assert check_kernels.main(["--interpret"]) == (sum(codes) > 0)
        assert capsys.readouterr().out == f"interpret: {codes.count(0)} of 2 suites passed\n"
    for suite in check_kernels.INTERPRETED:
        assert (children.ROOT / suite[0]).exists()


def test_a_missing_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(programs, "missing_compiler", lambda target: "no libtpu" if target == "v5e" else None)
    assert check_kernels.main(["--compile", "sm_90", "v5e"]) == 2
    assert capsys.readouterr().out.startswith("--compile v5e: no libtpu; run `uv run --isolated --group aot")


def test_programs_of_all_targets_hold_the_main_ones() -> None:
    assert set(programs.REQUIRED) < set(programs.TARGETS)
    for target in programs.TARGETS:
        assert set(programs.MAIN) < set(programs.programs(target))


@pytest.mark.parametrize("shape", [Shape(3, 40), Shape(2, 24, 24), Shape(2, 24, 5), Shape(1, 32, kv_dtype="int8")])
def test_bytes_and_operations_of_a_shape(shape: Shape) -> None:
    visible = sum(
        shape.context - shape.query_len + i + 1 for _ in range(shape.num_seqs) for i in range(shape.query_len)
    )
    assert shape.flops == visible * 64 * (2 * 128 + 2 * 128)  # a product with the key, one with the value
    head = 128 + 4 if shape.kv_dtype else 128 * 2
    tokens, queries = shape.num_seqs * shape.context, shape.num_seqs * shape.query_len
    assert shape.bytes == tokens * 8 * 2 * head + 2 * queries * 64 * 128 * 2


def test_names_differ_and_there_are_as_many_as_agreed() -> None:
    for implementation in ("mosaic_gpu", "mosaic_tpu"):
        names = device.names("full", implementation)
        assert set(names) == set(device.FAMILIES)
        assert all(len(set(of_family)) == len(of_family) for of_family in names.values())
        assert len(names["decode"]) + len(names["prefill"]) == 40
        assert min(len(names["decode"]), len(names["prefill"])) > 8
        cases = device.cases("full", implementation)
        assert max(length for family in cases.values() for case in family.values() for length in case.seq_lens) == 4096
        timed = sum(len(of) for family, of in names.items() if family not in ("limits", "decode", "prefill"))
        assert timed == 16


def in_this_process(command: list[str], names: list[str], **_: Any) -> Iterator[dict[str, Any]]:
    size, family = command[-2:]
    jax.config.update("jax_disable_most_optimizations", True)  # it takes longer to compile than to run
    for name in names:
        # JAX's own attention adds dtypes that are not equal.
        with jax.numpy_dtype_promotion("standard" if family == "contiguous" else "strict"):
            row = device.FAMILIES[family](size, family, name)
        yield json.loads(json.dumps(row))


@pytest.mark.slow
def test_the_device_check_on_this_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: Any) -> None:
    monkeypatch.setattr(children, "rows", in_this_process)
    assert check_kernels.main(["--device", "--tiny", "--output", str(tmp_path)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "device.jsonl").read_text().splitlines()]
    assert {row["family"] for row in rows} == set(device.FAMILIES)
    assert [row for row in rows if "error" in row] == []
    for row in rows:
        if row["family"] in ("attention", "contiguous", "xla", "model"):
            assert row["seconds"] > 0
            assert row["bytes"] > 0
    (compared,) = (row for row in rows if row["family"] == "xla")
    assert compared["largest_difference"] == 0.0  # XLA's against itself here
    skipped = {row["family"] for row in rows if "skipped" in row}
    assert skipped == {"torch", "jax"}
    out = capsys.readouterr().out.splitlines()
    assert out[-1].startswith(f"device: {len(rows)} of {len(rows)} rows in ")
    assert "; 0 failed" in out[-1]
    assert (tmp_path / "device.md").read_text().strip() in "\n".join(out)


def test_a_wrong_kernel_fails_the_device_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: Any) -> None:
    def rows(command: list[str], names: list[str], **_: Any) -> Iterator[dict[str, Any]]:
        family = command[-1]
        for i, name in enumerate(names):
            if family == "limits":
                yield {"name": name, "rate": 1e12, "device": "d", "implementation": "xla", "jax": "0", "platform": "p"}
            elif family == "decode" and i == 1:
                yield device.check("tiny", "decode", name)
            elif family == "attention":
                yield {"name": name, "seconds": 1e-3, "bytes": 500_000_000, "flops": 250_000_000}
            else:
                yield {"name": name, "skipped": "here"}

    monkeypatch.setattr(children, "rows", rows)
    monkeypatch.setattr(device, "assert_contract", lambda *_: (_ for _ in ()).throw(AssertionError("off by 1")))
    assert check_kernels.main(["--device", "--tiny", "--output", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    (wrong,) = (line for line in (tmp_path / "device.jsonl").read_text().splitlines() if "error" in line)
    name = json.loads(wrong)["name"]
    assert f"1 failed: decode {name}" in text.splitlines()[-1]
    assert f"- {name}: off by 1" in text
    assert "| 1000.0 | 500,000,000 | 50.0% | 25.0% | ok |" in text  # half of the bandwidth, a quarter of the rate


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: Any) -> None:
    failed = {"name": "copy", "error": "RuntimeError: JAX finds neither a GPU nor a TPU here"}
    monkeypatch.setattr(children, "rows", lambda *_, **__: iter([failed]))
    assert check_kernels.main(["--device", "--output", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"device: {failed['error']}"
    with pytest.raises(SystemExit, match="neither a GPU nor a TPU"):
        device.main("full", "limits", "copy")


@pytest.mark.slow
def test_the_device_check_in_processes_of_its_own(tmp_path: Any) -> None:
    command = [sys.executable, "scripts/check_kernels.py", "--device", "--tiny", "--output", str(tmp_path)]
    path = os.pathsep.join([str(children.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(command, cwd=children.ROOT, env=os.environ | {"PYTHONPATH": path}, check=True)
    rows = [json.loads(line) for line in (tmp_path / "device.jsonl").read_text().splitlines()]
    assert {row["family"] for row in rows} == set(device.FAMILIES)
    assert not [row for row in rows if "error" in row]


def test_outcomes_fit_a_cell() -> None:
    assert report.outcome({"error": "x" * 1000}) == "x" * 157 + "..."
    assert report.outcome({"problem": None}) == "ok"
    assert report.outcome({"skipped": "a\nb|c"}) == "a b/c"
