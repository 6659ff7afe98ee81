"""Everything that a GPU has to prove and to measure, in one command: one JSON and one page.

Each part is a process of its own with a time bound, so none costs the others their results, and
what a part had found when its time was over stays. Without a CUDA device, or with --rehearsal, the
parts run in tiny sizes on the CPU, the kernels in Triton's interpreter: that shows whether the
command works, and its figures mean nothing.

    python bench/gpu.py                       # build/gpu/gpu.json and build/gpu/gpu.md
    python bench/gpu.py --parts graphs times  # some parts
    python bench/gpu.py --rehearsal
    python bench/gpu.py --parts vllm --vllm "--model MODEL --recurrent MODEL" --data FOLDER
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import harness
from fastdraft.replay.measurement import versions, write_results
from harness import Row

HERE = Path(__file__).parent
SECONDS = 540  # in all, but for vLLM
VLLM_SECONDS = 1200
LAST_LINES = 12  # of a part's output, where it failed
REHEARSED = "**Rehearsal: tiny sizes on a CPU, interpreted kernels. These figures mean nothing.**"
CLOCKS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem")
ASKED = ("driver_version", *CLOCKS, "temperature.gpu", "power.draw")
TOUCH = "import torch; torch.ones(1, device='cuda').item()"
KERNEL_TESTS = ("-m", "pytest", "-v", "-W", "default", "--maxfail=10", "-p", "no:cacheprovider")


class Part(NamedTuple):
    """A process.

    Attributes:
        name, title: A short handle; what it shows, for people.
        command: What Python runs: a script of this folder, or tests, with the options of a GPU.
        seconds: What it may take on a GPU.
        rehearsal: The same in a rehearsal; None where there is nothing to rehearse.
        needs: A package that has to be there.
        tool: Of compute-sanitizer, under which it runs.
        takes: Which of --seconds and --data it understands.
        asks: An option that it cannot do without on a GPU, among those that are given by its name.
        decides: What follows from its result.
    """

    name: str
    title: str
    command: tuple[str, ...]
    seconds: int
    rehearsal: tuple[str, ...] | None
    needs: str | None = None
    tool: str | None = None
    takes: tuple[str, ...] = ()
    asks: str | None = None
    decides: str = ""


# Their bounds add up to SECONDS. First what only a GPU can tell, and what decides most.
PARTS = (
    Part(
        "arrivals",
        "Whether the last program to arrive sees what the others left",
        ("gpu_arrivals.py",),
        70,
        ("gpu_arrivals.py", "--rehearsal"),
        needs="triton",
        takes=("--seconds",),
        decides="a difference, or a counter that is not 0 again, ends fused launches: two, without "
        "`last_to_arrive`, take their place.",
    ),
    Part(
        "times",
        "Times of verification, caches cold, against one read of the logits",
        ("verification.py",),
        125,
        ("verification.py", "--device", "cpu"),
        takes=("--seconds",),
        decides="eager calls above three times their graph: the host path comes first; `flat` "
        "above 150 us at batch 1: thresholds split rows among programs.",
    ),
    Part(
        "graphs",
        "CUDA graphs",
        (*KERNEL_TESTS, "-k", "replays", "tests/kernels"),
        65,
        (*KERNEL_TESTS, "-k", "replays", "tests/kernels/test_align.py"),
        needs="triton",
        decides="a replay that differs from its call: steps stay out of graphs.",
    ),
    Part(
        "correctness",
        "The kernels' tests, on the chip",
        (*KERNEL_TESTS, "-k", "not replays", "tests/kernels"),
        90,
        (*KERNEL_TESTS, "tests/kernels/test_noise.py", "tests/kernels/test_steps.py"),
        needs="triton",
        decides="a failure that the interpreter does not show is the compiler's, or ours in what "
        "it cannot see: no release for GPUs before it is understood.",
    ),
    Part(
        "generation",
        "Whole generations, with and without drafts",
        ("gpu_generation.py",),
        90,
        ("gpu_generation.py", "--rehearsal"),
        takes=("--seconds", "--data"),
        decides="where drafts slow a batch down, what pays is priced wrongly there.",
    ),
    Part(
        "host-path",
        "Where a step synchronises",
        ("gpu_generation.py", "--host-path"),
        25,
        ("gpu_generation.py", "--host-path", "--rehearsal"),
        takes=("--data",),
        decides="more than one wait a step is one too many.",
    ),
    Part(
        "vllm",
        "vLLM: text of a recurrent model, and each way to draft",
        ("gpu_vllm.py",),
        VLLM_SECONDS,
        ("gpu_vllm.py", "--rehearsal"),
        needs="vllm",
        takes=("--data",),
        asks="--model",
        decides="wrong answers: `unproven_recurrent` stays as it is; none: it loses its name. A "
        "drafter ahead of fastdraft's at any number of rows: what a draft token costs there is "
        "looked at first.",
    ),
    *(
        Part(
            tool,
            f"The sanitizer {tool}",
            (*KERNEL_TESTS, "-k", "any_order", "tests/kernels"),
            25,
            None,
            needs="triton",
            tool=tool,
        )
        for tool in ("memcheck", "racecheck", "synccheck")
    ),
)


def flat(row: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """A row's values by dotted names; of a list, how many it holds."""
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", len(value) if isinstance(value, list) else value


def cell(value: Any) -> str:
    """A value in a table: nothing for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) >= 0.01 or value == 0 else f"{value:.1e}"
    return str(value).replace("|", "/").replace("\n", " ")


def lines_of(result: Mapping[str, Any]) -> list[str]:
    """Results as Markdown: a table of each list of rows, a line for each other value."""
    lines = []
    for key, value in result.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            rows = [dict(flat(row)) for row in value]
            heads = list(dict.fromkeys(head for row in rows for head in row))
            cells = [heads, ["---"] * len(heads)]
            cells += [[cell(row.get(head)) for head in heads] for row in rows]
            lines += ["", f"{key}:", "", *(f"| {' | '.join(row)} |" for row in cells), ""]
        elif isinstance(value, Mapping):
            lines += [f"- {key}.{name}: {cell(each)}" for name, each in flat(value)]
        else:
            lines.append(f"- {key}: {cell(value)}")
    return lines


def read_tests(log: str) -> Row:
    """Counts and failures in what pytest has printed so far, with -v, several at a time or not."""
    found: dict[str, str] = {}
    for line in log.splitlines():
        match = re.match(
            r"(?:\[gw\d+\] \[[ \d]+%\] )?(PASSED|FAILED|ERROR) (\S.*?)(?: - .*)?$", line
        )
        if match is None and (match := re.match(r"(\S.*::.*) (PASSED|FAILED|ERROR)\b", line)):
            found[match[1]] = match[2]
        elif match is not None:
            found[match[2].strip()] = match[1]
    failures = [test for test, outcome in found.items() if outcome != "PASSED"]
    return {
        # Of a run that ended before its first test nothing is known.
        "correct": not failures if found else None,
        "passed": len(found) - len(failures),
        "failures": [{"test": test} for test in failures],
    }


def missing(part: Part) -> str | None:
    """Why a part cannot run here, if so."""
    if part.needs is not None and importlib.util.find_spec(part.needs) is None:
        return f"{part.needs} is not here"
    if part.tool is None:
        return None
    # In some virtual machines the sanitizer itself does not work.
    command = [*under(part.tool), sys.executable, "-c", TOUCH]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as reason:
        return str(reason)
    said = " ".join((tried.stdout + tried.stderr).split())
    return said[-500:] if tried.returncode else None


def under(tool: str) -> list[str]:
    """The command that runs another one under a tool of compute-sanitizer."""
    path = f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin"
    found = shutil.which("compute-sanitizer", path=path) or "compute-sanitizer"
    return [found, "--tool", tool, "--error-exitcode", "9"]


def gpu() -> Row | None:
    """The GPU's name, driver and clocks, as they are found."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    found: Row = {"name": properties.name, "memory": properties.total_memory}
    found["cuda"] = torch.version.cuda or torch.version.hip
    command = ["nvidia-smi", f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as reason:
        return {**found, "clocks": f"nvidia-smi did not answer: {reason}"}
    values = asked.stdout.splitlines()[0].split(", ")
    return {**found, **dict(zip(ASKED, values, strict=False))}


def run(
    part: Part, seconds: float, *, rehearsal: bool, folder: Path, options: Sequence[str] = ()
) -> Row:
    """Runs a part for at most `seconds`; how it ended, and what it had found until then.

    status: "passed"; "wrong", where results are not what they have to be; "error"; "out of time";
    or "not run".
    """
    chosen = part.rehearsal if rehearsal else part.command
    reason = "there is nothing to rehearse without a GPU" if chosen is None else missing(part)
    if reason is None and not rehearsal and part.asks not in (None, *options):
        reason = f"--{part.name} has to give it {part.asks}"
    if reason is None and seconds < 5:
        reason = "no time was left"
    if reason is not None or chosen is None:
        return {"status": "not run", "reason": reason, "seconds": 0.0}
    file, log = folder / f"{part.name}.json", folder / f"{part.name}.log"
    file.unlink(missing_ok=True)
    are_tests = chosen[0] == "-m"
    if are_tests:
        command = [sys.executable, *chosen]
        if part.tool is not None:
            command = [*under(part.tool), *command]
        elif importlib.util.find_spec("xdist"):
            command += ["-n", str(min(8, os.cpu_count() or 1)), "--dist", "worksteal"]
    else:
        script, *more = chosen
        command = [sys.executable, str(HERE / script), "--json", str(file), *more, *options]
    if "--seconds" in part.takes:
        # So that it ends by itself, with what it has in order.
        command += ["--seconds", str(int(seconds * 0.8))]
    # What it has printed is in the log when it is stopped.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    if part.tool is not None:
        # What lies behind a tensor is to be out of bounds, not PyTorch's own.
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    if rehearsal:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    begin = time.monotonic()
    with log.open("wb") as output:
        # In a session of its own: what it has started ends with it.
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
    printed = log.read_text("utf-8", errors="replace")
    result: Row = read_tests(printed) if are_tests else {}
    if file.exists():
        result = json.loads(file.read_text("utf-8"))
        file.unlink()  # it becomes a part of the report
    status = "passed"
    if result.get("correct") is False:
        status = "wrong"
    elif code is None:
        status = "out of time"
    elif code != 0:
        status = "error"
    found: Row = {"status": status, "seconds": time.monotonic() - begin, "bound": seconds}
    if status == "passed":
        log.unlink()
    else:
        found["error"] = printed.splitlines()[-LAST_LINES:]
    return {**found, "result": result}


def page(report: Row) -> str:
    """The results as a page of Markdown."""
    device = report["gpu"]["name"] if report["gpu"] else "no GPU"
    rehearsed = [REHEARSED, ""] if report["rehearsal"] else []
    about = {key: report[key] for key in ("machine", "commit", "command", "gpu", "versions")}
    ends = [
        {"part": name, "how it ended": part["status"], "why": part.get("reason")}
        for name, part in report["parts"].items()
    ]
    lines = [f"# fastdraft on {device}", "", *rehearsed, *lines_of({**about, "parts": ends})]
    parts = {part.name: part for part in PARTS}
    for name, found in report["parts"].items():
        lines += ["", f"## {parts[name].title}", "", *rehearsed]
        if parts[name].decides:
            lines += [f"What it decides: {parts[name].decides}", ""]
        if "error" in found:
            lines += [f"**{found['status'].capitalize()}.** Its last lines:", ""]
            lines += ["```text", *found["error"], "```", ""]
        lines += lines_of(found.get("result", {}))
    return "\n".join(lines) + "\n"


def is_right(parts: Mapping[str, Row]) -> bool:
    """Nothing was wrong, and nothing broke."""
    return not any(part["status"] in ("wrong", "error") for part in parts.values())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [part.name for part in PARTS]
    add = parser.add_argument
    add("--parts", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    add("--data", type=Path, help="a folder of recorded requests (the sample)")
    add("--generation", default="", metavar="OPTIONS", help="of bench/gpu_generation.py")
    add("--vllm", default="", metavar="OPTIONS", help="of bench/gpu_vllm.py")
    add("--rehearsal", action="store_true", help="tiny sizes on the CPU")
    allowed = f"{SECONDS}, and {VLLM_SECONDS} for vLLM where --vllm is given"
    add("--seconds", type=float, help=f"in all (default: {allowed})")
    add("--began", type=float, help="since when they count, in seconds of the epoch")
    add("--out", type=Path, default=Path("build/gpu"), help="the folder to write to")
    options = parser.parse_args(arguments)
    rehearsal = options.rehearsal or not torch.cuda.is_available()
    if rehearsal and options.out.resolve().is_relative_to(HERE / "results"):
        parser.error(f"a rehearsal's figures mean nothing, and may not lie in {options.out}")
    options.out.mkdir(parents=True, exist_ok=True)
    report = harness.about(
        rehearsal=rehearsal,
        gpu=None if rehearsal else gpu(),
        versions=versions("triton", "vllm"),
        parts={},
    )
    # What went before, as building the package, is in the time that was given to all.
    spent = 0.0 if options.began is None else max(time.time() - options.began, 0.0)
    seconds = options.seconds or SECONDS + VLLM_SECONDS * bool(options.vllm)
    end = time.monotonic() + seconds - spent
    chosen = [part for part in PARTS if part.name in options.parts]
    for part in chosen:
        # What the parts before it have left is the last one's.
        left = max(end - time.monotonic(), 0.0)
        bound = left if part is chosen[-1] else min(part.seconds, left)
        more = shlex.split(vars(options).get(part.name) or "")
        if "--data" in part.takes and options.data is not None:
            more += ["--data", str(options.data)]
        print(f"\n{part.title}, {bound:.0f} s at most", flush=True)
        found = run(part, bound, rehearsal=rehearsal, folder=options.out, options=more)
        report["parts"][part.name] = found
        print(f"{found['status']}, {found['seconds']:.0f} s {found.get('reason', '')}", flush=True)
        # After each part: whoever stops the command has what is done.
        write_results(options.out / "gpu.json", report)
        (options.out / "gpu.md").write_text(page(report), "utf-8")
    if report["gpu"]:
        report["gpu_after"] = gpu()
        write_results(options.out / "gpu.json", report)
    print(f"\n{options.out / 'gpu.json'}\n{options.out / 'gpu.md'}")
    return 0 if is_right(report["parts"]) else 1


if __name__ == "__main__":
    sys.exit(main())
