"""The README's Python runs as written, and prints what it says."""

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_core(capsys):
    core, *_ = blocks("python")
    (printed,) = blocks("text")
    exec(compile(core, "README core", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out == printed


def test_engine(capsys):
    _, engine, sharing, _ = blocks("python")
    namespace = {"__name__": "readme"}
    exec(compile(engine, "README engine", "exec"), namespace)
    first, second = namespace["first"], namespace["second"]
    assert first.text.startswith(" Paris")
    assert second.text.startswith(" 5, 6")
    assert first.text in capsys.readouterr().out

    exec(compile(sharing, "README sharing", "exec"), namespace)
    printed = capsys.readouterr().out
    assert printed.startswith(" Rome")
    assert " Berlin" in printed
    metrics = namespace["metrics"]
    assert (metrics.pages_live, metrics.num_preemptions) == (0, 0)
    assert metrics.prefix.hit_rate > 0.4
    assert "first different token" in printed
    assert all(answer.cached_tokens >= 32 for answer in namespace["samples"])


def test_several_devices():
    *_, sharded = blocks("python")
    namespace = {"__name__": "readme"}
    exec(compile(sharded, "README several devices", "exec"), namespace)
    assert namespace["out"].shape == (4, 16, 16)
    assert namespace["cache"].tables.seq_lens.tolist() == [1, 1, 1, 1]


def test_commands_name_files_that_exist():
    for script in set(re.findall(r"scripts/\w+\.py|tests/\w+/\w+\.py", README)):
        assert (Path(__file__).parents[1] / script).is_file(), script
