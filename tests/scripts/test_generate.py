"""The command line of scripts/generate.py, with a tiny checkpoint; one run with the default weights."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import paged_jax as pj
from models import registry
from scripts import generate
from tests.scripts.refusals import assert_refused

ROOT = Path(__file__).parents[2]
PROMPTS = ["hello", "h", "{x: 1}\n", "llama"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory, make_tiny):
    return str(make_tiny().write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.fixture
def run(capsys, model_path):
    """Runs the command with the tiny model; gives (exit status, stdout, stderr)."""

    def call(*args, model=model_path):
        try:
            status = generate.main(["--model", model, *map(str, args)])
        except SystemExit as stopped:  # argparse
            status = stopped.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def subprocess_environment():
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def prompt_arguments():
    return [part for prompt in PROMPTS for part in ("--prompt", prompt)]


def test_output_file(run, tmp_path):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt, "id": 7}) + "\n\n" for prompt in PROMPTS))
    status, out, err = run("--prompts", prompts, "--output", output, "--max-tokens", 5, "--ignore-eos", "--max-seqs", 2)
    assert status == 0
    assert "loading" in err
    records = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [list(record) for record in records] == [
        ["index", "prompt", "text", "token_ids", "prompt_tokens", "finish_reason"]
    ] * 4
    assert [record["index"] for record in records] == [0, 1, 2, 3]
    assert [record["prompt"] for record in records] == PROMPTS
    assert [record["prompt_tokens"] for record in records] == [2, 1, 7, 4]
    assert all(len(record["token_ids"]) == 5 and record["finish_reason"] == "length" for record in records)
    for row in ("prefill", "decode", "pages live at the peak", "internal waste", "contiguous cache", "compilations"):
        assert row in out
    assert records[0]["text"] not in out

    again = ("--prompts", prompts, "--output", output, "--max-tokens", 5, "--ignore-eos", "--max-seqs", 2)
    status, out, err = run(*again, "--quiet")
    assert (status, out, err) == (0, "", "")
    assert [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()] == records


def test_stream(run, tmp_path):
    picture = tmp_path / "pages.png"
    pool = ("--page-size", 4, "--num-pages", 40)
    status, out, _ = run(*prompt_arguments(), "--max-tokens", 5, *pool, "--stats", "--plot", picture)
    assert status == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "prefix hits       0 of 14 prompt tokens (0.0 %)" in out
    assert "preemptions       0" in out
    places = [out.index(f"[{i}] {prompt}") for i, prompt in enumerate(PROMPTS, start=1)]
    assert places == sorted(places)
    assert "of 39 (4 tokens each)" in out
    quiet = run(*prompt_arguments(), "--max-tokens", 5, *pool, "--quiet")[1]
    assert out.startswith(quiet)
    assert "prefill" not in quiet


def test_a_picture_that_cannot_be_drawn_is_told_before_the_model_loads(run, monkeypatch, tmp_path):
    assert "cannot write" in run("--prompt", "a", "--plot", tmp_path / "no" / "pages.png", model="missing.gguf")[2]
    monkeypatch.setattr("scripts.command_line.find_spec", lambda name: None)
    status, out, err = run("--prompt", "a", "--plot", tmp_path / "pages.png", model="missing.gguf")
    assert (status, out) == (2, "")
    assert "pictures need matplotlib: install the extra, `uv sync --extra plots`" in err


def test_display_streams_the_first_unfinished_answer(capsys):
    display = generate.Display(["A", "B", "C"])

    def shown(index, text, reason=None):
        display(index, pj.TokenEvent(index, 0, text, reason))
        return capsys.readouterr().out

    assert shown(1, "b1") == "\n[1] A"
    assert shown(0, "a1") == "a1"
    assert shown(2, "c1", "stop") == ""
    assert shown(0, "a2", "length") == "a2\n\n[2] Bb1"
    assert shown(1, "b2", "length") == "b2\n\n[3] Cc1\n"
    display.close()
    assert capsys.readouterr().out == ""


def test_display_shows_samples_apart(capsys):
    display = generate.Display(["A", "B"], n=2)
    for index, sample, text in ((1, 1, "b1"), (0, 1, "a1"), (0, 0, "a0"), (1, 0, "b0")):
        display(index, pj.TokenEvent(index, 0, text, "stop", sample))
    assert capsys.readouterr().out == "\n[1.1] Aa0\n\n[1.2] Aa1\n\n[2.1] Bb0\n\n[2.2] Bb1\n"


def test_chat_puts_prompts_into_the_template(run, tmp_path):
    output = tmp_path / "out.jsonl"
    assert run("--chat", "--prompt", "hello", "--max-tokens", 1, "--output", output)[0] == 0
    (record,) = map(json.loads, output.read_text().splitlines())
    assert record["prompt"] == "hello"
    assert record["prompt_tokens"] == len("<s>") - 2 + len("[user] ") + 2 + 1 + len("[assistant]")


def test_dtype_and_folder(run, tmp_path, make_tiny):
    folder = make_tiny().write_folder(tmp_path / "folder")
    status, out, _ = run("--prompt", "hello", "--max-tokens", 2, "--dtype", "bfloat16", model=str(folder))
    assert status == 0
    assert "decode" in out


def test_pages_have_the_dtype_of_the_weights_or_their_own(model_path):
    checkpoint = registry.load(model_path, dtype=jnp.bfloat16)
    for given, dtype in (((), "bfloat16"), (("--kv-dtype", "float8_e4m3fn"), "float8_e4m3fn")):
        args = generate.parse_arguments(["--model", model_path, "--dtype", "bfloat16", *given])
        assert generate.build_engine(args, checkpoint, 1).layout.dtype == dtype


def test_implementation_is_named(run):
    assert "reference (asked for)" in run("--prompt", "h", "--max-tokens", 2, "--implementation", "reference")[1]


def test_samples_and_logprobs(run, tmp_path):
    output = tmp_path / "answers.jsonl"
    arguments = ("--prompt", "hello", "--prompt", "h", "--max-tokens", 6, "--ignore-eos", "--n", 2, "--logprobs")
    assert run(*arguments, "--temperature", 1.5, "--output", output)[0] == 0
    records = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [list(record)[-2:] for record in records] == [["sample", "logprobs"]] * 4
    assert [(record["index"], record["prompt"], record["sample"]) for record in records] == [
        (0, "hello", 0), (0, "hello", 1), (1, "h", 0), (1, "h", 1)
    ]  # fmt: skip
    assert all(len(record["logprobs"]) == 6 and max(record["logprobs"]) < 0 for record in records)
    assert records[0]["token_ids"] != records[1]["token_ids"]


def test_every_option_reaches_the_request():
    line = "--max-tokens 3 --ignore-eos --temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --seed 7 --n 2 --logprobs"
    args = generate.parse_arguments([*line.split(), "--stop", "a b", "--stop", "c"])
    (request,) = generate.make_requests(args, ["text"])
    assert request == pj.Request(
        "text", 3, True, pj.SamplingParams(0.5, 4, 0.9, 0.1, seed=7), n=2, stop=["a b", "c"], logprobs=0
    )
    (plain,) = generate.make_requests(generate.parse_arguments([]), ["text"])
    assert plain == pj.Request("text", 64, stop=[])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "--prompt: the prompt is empty; give at least one character"),
        (["--prompt", "", "--chat"], "--prompt: the prompt is empty; give at least one character"),
        (["--prompt", "a\udcff"], "--prompt: the prompt is not valid Unicode text"),
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens must be at least 1, got 0"),
        (["--prompt", "a", "--page-size", "0"], "page_size must be at least 1, got 0"),
        (["--prompt", "a", "--num-pages", "1"], "num_pages must be at least 2 (page 0 is the null page"),
        (["--prompt", "a", "--num-pages", "0"], "num_pages must be at least 2 (page 0 is the null page"),
        (["--prompt", "a", "--max-seqs", "0"], "max_seqs must be at least 1, got 0"),
        (["--prompt", "a", "--memory-utilization", "1.5"], "memory_utilization must be in (0, 1], got 1.5"),
        (["--prompt", "a", "--memory-utilization", "0"], "memory_utilization must be in (0, 1], got 0.0"),
        (["--prompt", "a", "--temperature", "-1"], "temperature must be at least 0 and finite, got -1.0"),
        (["--prompt", "a", "--temperature", "nan"], "temperature must be at least 0 and finite, got nan"),
        (["--prompt", "a", "--top-k", "0"], "top_k must be at least 1, or None for all tokens, got 0"),
        (["--prompt", "a", "--top-p", "0"], "top_p must be in (0, 1], got 0.0"),
        (["--prompt", "a", "--top-p", "1.5"], "top_p must be in (0, 1], got 1.5"),
        (["--prompt", "a", "--min-p", "2"], "min_p must be in [0, 1], got 2.0"),
        (["--prompt", "a", "--seed", "-1"], "seed must be in [0, 2**32), got -1"),
        (["--prompt", "a", "--seed", "4294967296"], "seed must be in [0, 2**32), got 4294967296"),
        (["--prompt", "a", "--n", "0"], "n must be at least 1, got 0"),
        (["--prompt", "a", "--stop", ""], "a stop string is empty"),
        (["--prompt", "a", "--logprobs"], "--logprobs are written to a file: give --output too"),
        (["--prompt", "a", "--implementation", "triton"], "implementation must be one of"),
        (["--prompt", "a", "--dtype", "int4"], "argument --dtype: invalid choice: 'int4'"),
        (["--prompt", "a", "--seed", "x"], "argument --seed: invalid int value: 'x'"),
        (["--prompt", "a", "--prompts", "b"], "argument --prompts: not allowed with argument --prompt"),
        (["--unknown"], "unrecognized arguments: --unknown"),
        (["--prompts", "nowhere.jsonl"], "cannot read nowhere.jsonl"),
        (
            ["--prompt", "a", "--output", "no/such/out.jsonl"],
            "cannot write no/such/out.jsonl: No such file or directory",
        ),
        (["--prompt", "a", "--output", "/"], "cannot write /: Is a directory"),
        (["--prompt", "a"], "cannot load 'nowhere.gguf': give 'smollm2-135m', the path of an existing .gguf file"),
    ],
)
def test_bad_input_is_refused_before_the_model_loads(run, arguments, message):
    """The model is missing too, and that is only said when all else is well."""
    assert_refused(run(*arguments, model="nowhere.gguf"), message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": ', "line 2: not JSON"),
        ("[" * 100_000, "line 1: not JSON"),
        ('{"prompt": "a", "id": ' + "1" * 5000 + "}", "line 1: not JSON"),
        ('\n["a"]\n', 'line 2: must be {"prompt": "..."}'),
        ('{"prompt": 3}\n', 'line 1: must be {"prompt": "..."}'),
        ('{"prompt": "a"}\n\n{"prompt": ""}', "line 3: the prompt is empty"),
        ('{"prompt": "\\ud800"}', "line 1: the prompt is not valid Unicode text"),
        ("\n", "holds no prompt"),
    ],
    ids=range(8),
)
def test_bad_prompt_files(run, tmp_path, content, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    assert_refused(run("--prompts", path, model="nowhere.gguf"), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "h" * 200], "the prompt has 200 tokens, but at most 127 fit"),
        (["--prompt", "h" * 20, "--num-pages", "2"], "the prompt has 20 tokens, but at most 15 fit"),
        (["--prompt", "h", "--num-pages", "2", "--page-size", "1"], "the prompt has 1 tokens, but at most 0 fit"),
        (["--prompt", "h", "--num-pages", "3"], "lower max_tokens to at most 31 or take more pages"),
    ],
)
def test_prompts_that_do_not_fit_leave_the_output_alone(run, tmp_path, arguments, message):
    output, kept = tmp_path / "new.jsonl", tmp_path / "kept.jsonl"
    assert_refused(run(*arguments, "--output", output), message)
    kept.write_text("before")
    assert_refused(run(*arguments, "--output", kept), message)
    assert (list(tmp_path.iterdir()), kept.read_text()) == ([kept], "before")


def test_interrupted_run_ends_cleanly(run, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(pj.Engine, "generate", interrupt)
    status, out, err = run("--prompt", "hello")
    assert status == 130
    assert err.endswith("interrupted\n")
    assert "Traceback" not in err
    assert out == ""


def test_default_run_shows_text_and_ctrl_c_stops_it():
    """The README's command on the real weights, stopped as a user would.

    The handler is set anew, since processes started in the background begin with Ctrl-C ignored.
    """
    program = (
        "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "sys.argv = ['scripts/generate.py', '--max-tokens', '2000']; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", program],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=subprocess_environment(),
    )  # fmt: skip
    assert process.stdout is not None
    try:
        seen = ""
        started = time.monotonic()
        while "[1] The three primary colours are" not in seen or len(seen) < 60:
            seen += process.stdout.read(1)
            assert time.monotonic() - started < 200
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert err.endswith("interrupted\n")
    assert np.all([line not in seen + out for line in ("decode ", "compilations")])
