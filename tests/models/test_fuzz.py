"""Damaged checkpoints: whatever bytes are wrong, loading succeeds or says in one line which file cannot be read.

Warnings are errors here, time is limited by pytest, and memory by the operating system.
"""

import copy
import json
import re
import resource
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from models import registry

MORE_MEMORY = 1 << 29
"""Bytes that loading a file of 200 kB may take at most."""
SEEDS = pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 12))])
INTEGERS = (0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1)
NUMBERS = (-1, 0, 1, 3, 2**31, 10**30, 0.5, -1e300, 1e400, float("nan"))
VALUES = (*NUMBERS, None, True, "", "x", "\0", [], [[]], {}, [1], {"a": 1})


@contextmanager
def limited_memory() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MORE_MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def cut(content: bytes, rng: np.random.Generator) -> bytes:
    return content[: rng.integers(len(content))]


def flip(content: bytes, rng: np.random.Generator) -> bytes:
    """Some bits at random, most of them near the front, where the sizes and names are."""
    damaged = bytearray(content)
    for _ in range(rng.integers(1, 5)):
        damaged[int(len(damaged) * rng.random() ** 3)] ^= 1 << rng.integers(8)
    return bytes(damaged)


def overwrite(content: bytes, rng: np.random.Generator) -> bytes:
    """A telling number in place of four or eight bytes."""
    number = struct.pack("<q", INTEGERS[rng.integers(len(INTEGERS))])[: rng.choice([4, 8])]
    start = int((len(content) - 8) * rng.random() ** 3)
    return content[:start] + number + content[start + len(number) :]


def overwrite_value(content: bytes, rng: np.random.Generator) -> bytes:
    """A telling number in place of the value, or of its type, of one of a GGUF file's keys."""
    keys = [match.end() for match in re.finditer(rb"(llama|general|tokenizer)\.[a-z_.]+", content)]
    start = keys[rng.integers(len(keys))] + rng.choice([0, 4])
    return content[:start] + struct.pack("<q", INTEGERS[rng.integers(len(INTEGERS))])[:4] + content[start + 4 :]


def change_value(content: bytes, rng: np.random.Generator) -> bytes:
    """Another JSON value in place of one of the first few, or of one inside it; half of the time none at all."""
    root = json.loads(content)
    node, key = {"": root}, ""
    while isinstance(node[key], dict | list) and len(node[key]) and (node[key] is root or rng.random() < 0.6):
        node = node[key]
        key = list(node)[rng.integers(len(node))] if isinstance(node, dict) else int(rng.integers(len(node)))
    if rng.random() < 0.2:
        del node[key]
    else:
        others = INTEGERS if isinstance(node[key], int) and rng.random() < 0.6 else VALUES
        node[key] = copy.deepcopy(others[rng.integers(len(others))])
    return json.dumps(root).encode()


BINARY, TEXT = (cut, flip, overwrite), (cut, flip, change_value, change_value, change_value)


def assert_survives(load: str, path: Path, damages: tuple[Callable, ...], rng: np.random.Generator, count: int) -> None:
    """Damages one file `count` times; at least one in three must be noticed, or the damage was none."""
    content, refused = path.read_bytes(), 0
    for i in range(count):
        path.write_bytes(damages[i % len(damages)](content, rng))
        try:
            with limited_memory():
                registry.load(load)
        except (ValueError, OSError) as error:
            refused += 1
            message = str(error)
            assert "\n" not in message
            assert load in message, message
    path.write_bytes(content)
    assert refused > count / 3


@SEEDS
def test_gguf(tiny, tmp_path, seed):
    rng = np.random.default_rng(seed)
    path = tiny.write_gguf(tmp_path / "m.gguf", "Q4_0")
    assert_survives(str(path), path, (*BINARY, overwrite_value), rng, 160)


@SEEDS
def test_safetensors(tiny, tmp_path, seed):
    rng = np.random.default_rng(seed)
    folder = tiny.write_folder(tmp_path / "hf")
    assert_survives(str(folder), folder / "model.safetensors", BINARY, rng, 100)


@SEEDS
@pytest.mark.parametrize(
    ("name", "count"), [("config.json", 120), ("tokenizer.json", 120), ("tokenizer_config.json", 40)]
)
def test_json_files(tiny, tmp_path, name, count, seed):
    rng = np.random.default_rng(seed)
    folder = tiny.write_folder(tmp_path / "hf")
    assert_survives(str(folder), folder / name, TEXT, rng, 100)


def test_index(tiny, tmp_path):
    rng = np.random.default_rng(0)
    folder = tiny.write_shards(tmp_path / "hf")
    assert_survives(str(folder), folder / "model.safetensors.index.json", TEXT, rng, 30)


def test_gemma2_config(tiny, tmp_path):
    """It has most of the fields. The tensors are another model's, so that all but the reading of config.json fails."""
    rng = np.random.default_rng(0)
    folder = tiny.write_folder(tmp_path / "hf")
    source = Path(__file__).parents[1] / "data" / "tiny" / "gemma2" / "config.json"
    (folder / "config.json").write_bytes(source.read_bytes())
    assert_survives(str(folder), folder / "config.json", TEXT, rng, 80)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 100_000, b'"text"', b"{"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_not_json(tiny, tmp_path, name, content):
    folder = tiny.write_folder(tmp_path / "hf")
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} (is not valid JSON|must hold a JSON object).*; get it again"):
        registry.load(str(folder))
