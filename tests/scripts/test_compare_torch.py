"""The comparison with stubs for all systems; this package's own worker on a tiny model."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from scripts import compare_torch
from scripts.command_line import UsageError
from scripts.compare import loads, outputs, process
from scripts.compare.process import System
from tests.scripts.refusals import assert_refused

STUB = Path(__file__).parent / "stub_worker.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_tiny):
    return make_tiny().write_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def compare(capsys, folder):
    def compare(*args):
        status = compare_torch.main(["--model", str(folder), "--torch-python", sys.executable, *map(str, args)])
        return (status, *capsys.readouterr())

    return compare


@pytest.fixture
def stubs(monkeypatch):
    monkeypatch.setattr(process, "BASELINE", STUB)
    monkeypatch.setitem(process.WORKERS, "paged_jax", STUB)


def test_two_tables_and_a_picture(compare, stubs, tmp_path):
    results, picture = tmp_path / "out.json", tmp_path / "out.png"
    options = ("--loads", "plain-8", "plain-1", "--rounds", 3, "--json", results, "--plot", picture)
    status, out, _ = compare(*options)
    assert status == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    same, best, processes = (part.split("\n\n")[0] for part in re.split(r"\n\|(?:---\|)+\n", out)[1:])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in same.splitlines()]
    eight = {row[1]: row for row in rows if row[0] == "plain-8"}
    assert eight["paged_jax"][2:5] == ["float32", "512.0", "512.0 to 512.0"]
    assert eight["dense"][3] == "256.0"
    assert [eight[name][5] for name in ("paged_jax", "dense", "vllm")] == ["", "2.00", "4.00"]
    assert eight["dense"][7:9] == ["3", ""]
    assert eight["dense"][-1] == "512 tokens equal"
    assert eight["vllm"][-1] == "450 tokens equal, 1 near ties"
    assert eight["static"][-1] == "not run: ModuleNotFoundError: No module named 'torch'"
    assert eight["continuous"][-1] == "not run: no room for this"
    assert eight["static-compiled"][-1] == "not run: the process ended with status 1: compiler missing"
    assert "| plain-8 | dense | bfloat16 | 512.0 |" in best
    assert "logprobs differ by 0.250, 25.0% flips" in best
    assert "| paged_jax | float32 | 0.5 | 5 |  | stub 1 |" in processes
    written = json.loads(results.read_text())
    assert len(written["results"]) == 2 * 2 * 6
    assert all(len(result["seconds"]) in (0, 3) for result in written["results"])


def test_a_run_that_is_cut_short_leaves_its_rounds(compare, stubs, monkeypatch, tmp_path):
    rounds = []

    def add_round(*args):
        if len(rounds) == 2:
            raise UsageError("cut")
        rounds.append(add(*args))

    add = compare_torch.add_round
    monkeypatch.setattr(compare_torch, "add_round", add_round)
    path = tmp_path / "out.json"
    options = ("--loads", "plain-1", "--rounds", 3, "--systems", "dense", "--dtypes", "float32", "--json", path)
    status, _, _ = compare(*options)
    assert status == 2
    assert [len(result["seconds"]) for result in json.loads(path.read_text())["results"]] == [2, 2]


def test_outputs_that_no_near_tie_explains_are_an_error(compare, stubs, monkeypatch):
    monkeypatch.setattr(outputs, "NEAR_TIE", 1e-4)
    status, out, err = compare("--loads", "plain-1", "--rounds", 1, "--systems", "vllm", "--dtypes", "float32")
    assert status == 2
    assert "1 ANSWERS DIFFER" in out
    assert "some answers differ where no near tie explains it" in err


def test_tokens_are_compared_up_to_where_answers_part():
    requests = [([7] * 3, 4)] * 4
    ours = [[1, 2, 3, 4]] * 4
    theirs = [[1, 2, 3, 4], [1, 9, 9, 9], [1, 2, 3, 9], [1, 2, 3]]
    asked = []

    def score(token_ids):
        asked.append(token_ids)
        return {"gaps": [1.0, 1.0, 1.0, 1e-3, 1.0, 0.5]}

    got = outputs.compare_tokens(requests, ours, theirs, score)
    assert got == {"compared": 4 + 1 + 3 + 3, "near ties": 1, "different": 2}
    assert asked == [[7, 7, 7, 1, 2, 3, 4]] * 2


def test_loads():
    made = {name: make(list) for name, make in loads.LOADS.items()}  # a letter is a token
    assert [len(requests) for requests in made.values()] == [1, 8, 16, 32, 16, 64]
    shared = [prompt for prompt, _ in made["shared-16"]]
    assert len({tuple(prompt[: len(loads.INSTRUCTIONS)]) for prompt in shared}) == 1
    assert len({tuple(prompt) for prompt in shared}) == 16
    counts = [count for _, count in made["mixed-64"]]
    assert (min(counts), max(counts)) == (4, 400)
    assert counts != sorted(counts)
    assert loads.longest([made["mixed-64"]]) >= 400


@pytest.mark.slow
def test_our_own_worker(folder):
    worker = process.start(System("paged_jax", "float32"), "unused", {"model": folder, "threads": 1, "max-len": 64,
                                                                      "max-seqs": 2})  # fmt: skip
    requests = [([5, 6, 7], 4), ([8, 9], 6)]
    answer = worker.run(requests)
    assert [len(tokens) for tokens in answer["tokens"]] == [4, 6]
    assert answer["tokens"] == worker.run(requests)["tokens"]
    assert 0 < answer["kv_used"] <= answer["kv_reserved"]
    text = requests[0][0] + answer["tokens"][0]
    scores = worker.score(text)
    assert scores["likeliest"][2:] == answer["tokens"][0]
    assert len(scores["logprobs"]) == len(scores["gaps"]) == len(text) - 1
    assert worker.peak["resident"] > 1e7
    worker.close()


@pytest.mark.torch
def test_transformers_gives_the_same_tokens(compare):
    """Under the Python that TORCH_PYTHON names, or this one."""
    python = os.environ.get("TORCH_PYTHON", sys.executable)
    systems = ("dense", "static", "continuous")
    options = ("--rounds", 1, "--systems", *systems, "--loads", "plain-8", "--torch-python", python)
    status, out, err = compare(*options)
    if "No module named" in out:
        pytest.skip(f"{python} has no torch or transformers")
    assert status == 0, err
    assert "not run" not in out
    same = [line for line in out.split("Each in its best dtype")[0].splitlines() if "| float32 |" in line]
    assert len(same) == 1 + len(systems)
    assert all("512 tokens equal" in line for line in same[1:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", 0], "--rounds must be at least 1, got 0"),
        (["--model", "nowhere"], "--model: nowhere is no folder"),
        (["--json", "no/such/out.json"], "cannot write no/such/out.json"),
        (["--systems", "sglang"], "argument --systems: invalid choice: 'sglang'"),
    ],
)
def test_bad_arguments(compare, arguments, message):
    assert_refused(compare(*arguments), message)


def test_a_python_that_is_not_there_is_told(compare, stubs):
    status, out, _ = compare("--torch-python", "no/python", "--loads", "plain-1", "--rounds", 1, "--systems", "dense")
    assert status == 0
    assert "not run: cannot start no/python: No such file or directory" in out
