"""`make gpu` runs parts that may fail, and writes one JSON and one page."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import gpu
import gpu_generation
from fastdraft.replay import Record
from gpu import Part

SCRIPTS = {
    "passed": "finish(correct=True)",
    "wrong": "finish(correct=False); sys.exit(1)",
    "error": "finish(correct=True); raise RuntimeError('the device is lost')",
    "out of time": "finish(correct=True); time.sleep(600)",
}


def part(folder, status, **more):
    script = folder / f"{status}.py"
    script.write_text(
        "import json, sys, time\n"
        "def finish(**found):\n"
        "    open(sys.argv[sys.argv.index('--json') + 1], 'w').write(json.dumps(found))\n"
        f"{SCRIPTS[status]}\n"
    )
    return Part(status, status, (str(script),), 60, (str(script),), **more)


def run(tmp_path, monkeypatch, parts, *arguments):
    monkeypatch.setattr(gpu, "PARTS", tuple(parts))
    status = gpu.main(["--rehearsal", "--out", str(tmp_path / "out"), *arguments])
    report = json.loads((tmp_path / "out" / "gpu.json").read_text())
    return status, report, (tmp_path / "out" / "gpu.md").read_text()


def test_each_part_survives_the_others(tmp_path, monkeypatch):
    # The last part would get all the time that is left.
    parts = [part(tmp_path, status) for status in reversed(SCRIPTS)]
    parts[0] = parts[0]._replace(seconds=6)
    status, report, page = run(tmp_path, monkeypatch, parts)
    assert status == 1
    assert {name: found["status"] for name, found in report["parts"].items()} == {
        name: name for name in SCRIPTS
    }
    # All is in the report; beside it lies what a part that did not pass has printed.
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "gpu.json",
        "gpu.md",
        *(f"{name}.log" for name in SCRIPTS if name != "passed"),
    }
    # Results from before the end stay.
    assert report["parts"]["out of time"]["result"] == {"correct": True}
    assert "the device is lost" in page and "- correct: False" in page


def test_parts_that_cannot_run_say_why(tmp_path, monkeypatch):
    parts = [
        part(tmp_path, "passed"),
        part(tmp_path, "wrong")._replace(rehearsal=None),
        part(tmp_path, "error", needs="no-such-tool"),
    ]
    status, report, page = run(tmp_path, monkeypatch, parts)
    assert status == 0
    assert [found["status"] for found in report["parts"].values()] == ["passed"] + ["not run"] * 2
    assert "there is nothing to rehearse" in page and "no-such-tool is not here" in page


def test_a_part_gets_the_options_of_its_name(tmp_path, monkeypatch):
    parts = [part(tmp_path, "passed", asks="--model")._replace(name="vllm")]
    status, report, _ = run(tmp_path, monkeypatch, parts, "--vllm", "--model 'a folder'")
    assert status == 0 and report["parts"]["vllm"]["status"] == "passed"
    assert report["parts"]["vllm"]["bound"] > gpu.SECONDS
    found = gpu.run(parts[0], 9.0, rehearsal=False, folder=tmp_path)
    assert found["status"] == "not run" and found["reason"] == "--vllm has to give it --model"


def test_results_name_where_they_come_from(tmp_path, monkeypatch):
    _, report, page = run(tmp_path, monkeypatch, [part(tmp_path, "passed")])
    assert report["rehearsal"] is True and report["gpu"] is None
    assert {"machine", "commit", "command", "versions"} <= report.keys()
    assert page.count(gpu.REHEARSED) == 2  # on top, and at the part


def test_no_rehearsal_among_the_results(capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--rehearsal", "--out", str(gpu.HERE / "results")])
    assert "figures mean nothing" in capsys.readouterr().err


def test_bounds_add_up_to_the_time_that_is_lent():
    assert sum(part.seconds for part in gpu.PARTS if part.name != "vllm") == gpu.SECONDS
    assert all(part.decides for part in gpu.PARTS if part.tool is None)


@pytest.mark.parametrize("name", ["arrivals", "times", "graphs", "host-path"])
def test_a_part_is_rehearsed(tmp_path, monkeypatch, name):
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # a worker takes longer to start than to test
    parts = [each for each in gpu.PARTS if each.name == name]
    status, report, page = run(tmp_path, monkeypatch, parts)
    assert status == 0
    found = report["parts"][name]
    assert found["status"] == "passed"
    if name == "graphs":
        assert found["result"] == {"correct": True, "passed": 1, "failures": []}
    elif name == "host-path":
        transfers = found["result"]["transfers"]
        assert not [row for row in transfers if "unavailable" in row]
        # A CPU waits for nothing, so nothing was counted.
        assert {row["waits_a_step"] for row in transfers} == {None}
    elif name == "arrivals":
        assert found["result"]["correct"] is True and found["result"]["replays"] > 0
        assert "What it decides" in page
    else:
        assert "| greedy | 1 | 4 | 1000 | float32 |" in page and "align.eager_us" in page
        assert "flashinfer.unavailable" in page  # with the reason
        # Seven verbs in four sizes.
        assert len(found["result"]["rows"]) + found["result"]["left_out"] == 28


@pytest.mark.parametrize("more", [[], ["-n", "1"]], ids=["one by one", "as a worker says"])
def test_failures_of_tests_are_reported(tmp_path, monkeypatch, more):
    test = tmp_path / "test_some.py"
    test.write_text(
        "import pytest, warnings\n"
        "@pytest.mark.parametrize('name', ['a - b', 'c'])\n"
        "def test_right(name): warnings.warn('a library is old')\n"
        "def test_wrong(): assert 1 == 2, 'one is not two'\n"
    )
    broken = tmp_path / "test_broken.py"
    broken.write_text("import no_such_module\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # most of what pytest imports
    command = [sys.executable, *gpu.KERNEL_TESTS, "-p", "xdist", *more]
    printed = [
        subprocess.run([*command, str(file)], capture_output=True, text=True, check=False).stdout
        for file in (test, broken)
    ]
    found, unread = map(gpu.read_tests, printed)
    assert (found["correct"], found["passed"], len(found["failures"])) == (False, 2, 1)
    assert "test_wrong" in found["failures"][0]["test"]
    assert (unread["correct"], unread["passed"], len(unread["failures"])) == (False, 0, 1)
    # A stopped run gives the results that it had printed.
    stopped = printed[0][: printed[0].index("= FAILURES")]
    assert gpu.read_tests(stopped) == found


@pytest.mark.parametrize(
    ("does", "status"),
    [
        ("echo Device not supported; exit 1", "not run"),
        ('shift 4; exec "$@"', "passed"),
        ('shift 4; case "$*" in *pytest*) exit 9; esac', "error"),
    ],
)
def test_a_sanitizer_runs_tests_where_it_works(tmp_path, monkeypatch, does, status):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\n{does}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(gpu, "TOUCH", "")  # here is no device
    (sanitizer,) = (each for each in gpu.PARTS if each.name == "memcheck")
    test = tmp_path / "test_some.py"
    test.write_text("def test_right(): pass\n")
    sanitizer = sanitizer._replace(rehearsal=(*gpu.KERNEL_TESTS, str(test)), needs=None)
    _, report, page = run(tmp_path, monkeypatch, [sanitizer])
    assert report["parts"]["memcheck"]["status"] == status
    if status == "error":  # it died before a test had run
        assert report["parts"]["memcheck"]["result"]["correct"] is None
    if status == "not run":
        assert "Device not supported" in page


def test_earlier_results_count(tmp_path, monkeypatch):
    options = ["--seconds", "600", "--began", str(time.time() - 590)]
    _, report, _ = run(tmp_path, monkeypatch, [part(tmp_path, "passed")], *options)
    assert report["parts"]["passed"]["bound"] < 11


def record(prompt, output, reference=None):
    ids = [
        None if each is None else np.array(each, np.int32) for each in (prompt, output, reference)
    ]
    return Record("", *ids)


def test_requests_have_token_ids_of_their_own():
    records = [
        ("copy", record([7, 8, 7, 9], [8, 7, 8], [9, 4])),
        ("story", record([7, 3], [3, 7])),
        ("too many tokens", record(range(40), [1])),
    ]
    requests, said, owner, end = gpu_generation.renumbered(records, new_tokens=3, vocabulary=30)
    # 4, 7, 8, 9 are 0 to 3; then 3 and 7 are 4 and 5.
    assert requests == [
        gpu_generation.Request("copy", [1, 2, 1, 3], [2, 1, 2], [3, 0]),
        gpu_generation.Request("story", [5, 4], [4, 5, end], None),
    ]
    assert said.tolist() == [[1, 2, 1, 3, 2, 1, 2, end], [5, 4, 4, 5, end, end, end, end]]
    assert owner[:6].tolist() == [0, 0, 0, 0, 1, 1]


def test_prompts_are_lengthened_by_tokens_of_their_own():
    records = [("copy", record([7, 8, 7, 9], [8, 7, 8])), ("story", record([7, 3], [3, 7]))]
    sizes = {"new_tokens": 3, "vocabulary": 30}
    short = gpu_generation.renumbered(records, **sizes)[0]
    long, said, owner, _ = gpu_generation.renumbered(records, **sizes, context=20)
    for index, (one, other) in enumerate(zip(short, long, strict=True)):
        assert len(other.prompt) == 20
        assert other.prompt[-len(one.prompt) :] == one.prompt
        assert {int(owner[token]) for token in other.prompt} == {index}
        assert said[index, 20:23].tolist() == other.output


@pytest.mark.parametrize("way", gpu_generation.WAYS)
def test_a_forced_model_says_what_the_records_say(way):
    device = torch.device("cpu")
    text = list(range(5, 40)) * 2
    records = [("copy", record(text, text[:30])), ("end", record([3, 5, 5], [5, 6]))]
    requests, said, owner, end = gpu_generation.renumbered(
        records, new_tokens=24, vocabulary=16_000
    )
    model = gpu_generation.forced_model("tiny", said, owner, device=device)
    sizes = {"new_tokens": 24, "columns": 160, "end": end}
    for group in (requests[:1], requests if way != "prompt lookup" else requests[1:]):
        row = gpu_generation.generate(way, model, group, **sizes)
        assert row["equal"] and row["tokens"] == sum(len(each.output) for each in group)
        assert row["tokens_per_step"] <= row["tokens"]
    row = gpu_generation.generate(way, model, requests[:1], **sizes)
    assert (row["forwards"] < 12) == (not way.startswith("plain"))
