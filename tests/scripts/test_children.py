"""Work in a child process: what it had done is kept, whatever becomes of it."""

import sys
import time

import pytest

from scripts.kernels import children

CHILD = """
import json, os, sys, time
print("not a row")
for name in sys.argv[1:]:
    if name == "raises":
        raise ValueError("a reason")
    if name == "crashes":
        os.abort()
    if name == "hangs":
        time.sleep(1000)
    print(json.dumps({"name": name, "path": os.environ["PYTHONPATH"], "set": os.environ["SET"]}), flush=True)
    if name == "lingers":
        os.close(1)
        time.sleep(1000)
"""


def run(*names, **options):
    command = [sys.executable, "-c", CHILD]
    return list(children.rows(command, names, environment={"SET": "1"}, **{"silence": 60.0, **options}))


def test_rows_come_in_turn_from_one_process():
    first, second = run("a", "b")
    assert (first["name"], second["name"]) == ("a", "b")
    assert first["set"] == "1"
    assert first["path"].startswith(str(children.ROOT))


def test_an_error_costs_its_own_row_only():
    first, second, third, fourth = run("a", "raises", "crashes", "b")
    assert second == {"name": "raises", "error": "ValueError: a reason"}
    assert third["name"] == "crashes"
    assert "exit code -6" in third["error"]
    assert (first["name"], fourth["name"]) == ("a", "b")


def test_silence_is_ended():
    started = time.monotonic()
    first, second = run("hangs", "b", silence=2.0)
    assert first == {"name": "hangs", "error": "nothing for 2 s: killed"}
    assert second["name"] == "b"
    assert time.monotonic() - started < 30


def test_the_deadline_ends_everything():
    started = time.monotonic()
    rows = run("a", "hangs", "b", deadline=started + 2)
    assert [row["name"] for row in rows] == ["a"]
    assert time.monotonic() - started < 30
    assert run("a", deadline=started) == []


def test_too_many_failures_end_it():
    assert [row["name"] for row in run("raises", "a", "crashes", "b", max_failures=2)] == ["raises", "a", "crashes"]


def test_a_process_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(children, "END_SECONDS", 0.2)
    assert [row["name"] for row in run("lingers")] == ["lingers"]
