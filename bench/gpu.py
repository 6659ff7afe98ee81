"""Everything that a GPU has to prove and to measure, in one command: one JSON and one page.

Each part is a script of its own, in a process of its own with a time bound: neither an error, nor
a crash of the driver, nor a part that takes too long costs the other parts their results. What a
part had found when its time was over stays. Without a CUDA device, or with --rehearsal, the parts
run in tiny sizes on the CPU, the kernels in Triton's interpreter: that shows whether the command
works, and its figures mean nothing.

    python bench/gpu.py                       # build/gpu/gpu.json and build/gpu/gpu.md
    python bench/gpu.py --parts graphs times  # some parts
    python bench/gpu.py --rehearsal
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import harness
from fastdraft.replay.measurement import write_results
from harness import Row

HERE = Path(__file__).parent
SECONDS = 540  # in all
LAST_LINES = 12  # of a part's output, where it failed
CLOCKS = (
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "clocks.max.mem",
    "temperature.gpu",
    "power.draw",
)

REHEARSED = "**Rehearsal: tiny sizes on a CPU, interpreted kernels. These figures mean nothing.**"

Lines = list[str]


@dataclass(frozen=True)
class Part:
    """A script, and how its results look on the page.

    Attributes:
        name, title: A short handle; what it shows, for people.
        script: In this folder.
        seconds: What it may take on a GPU.
        lines: Writes its results as Markdown.
        options, rehearsal: Its options on a GPU, and in a rehearsal; None where there is nothing to
            rehearse.
        missing: Why it cannot run here, if so.
        takes_seconds: Whether it can be told how long it has.
        takes_data: Whether it can be given a folder of recorded requests.
    """

    name: str
    title: str
    script: str
    seconds: int
    lines: Callable[[Row], Lines]
    options: tuple[str, ...] = ()
    rehearsal: tuple[str, ...] | None = ()
    missing: Callable[[], str | None] = lambda: None
    takes_seconds: bool = False
    takes_data: bool = False


def cell(value: Any, digits: int = 2) -> str:
    """A value in a table: nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:,.{digits}f}" if isinstance(value, float) else str(value).replace("|", "/")


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> Lines:
    """A table of Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(map(cell, line)) + " |" for line in lines]


def correctness_lines(result: Row) -> Lines:
    lines = [f"{result.get('passed', 0)} passed, {result.get('failed', 0)} failed."]
    for failure in result.get("failures", []):
        message = " ".join(failure["message"].split())
        lines += ["", f"- `{failure['test']}`: {message}"]
    return lines


def graph_lines(result: Row) -> Lines:
    rows = []
    for row in result.get("rows", []):
        if "error" in row:
            rows.append([row["operation"], row["error"]])
            continue
        eager, replay = row.get("eager", {}), row.get("replay", {})
        launches = None if "launches" not in eager else len(eager["launches"])
        rows.append(
            [
                row["operation"],
                row["replays"],
                row["different"],
                row["beside_reference"],
                launches,
                eager.get("allocations"),
                replay.get("allocations"),
                row.get("warm_eager_us"),
                row.get("warm_graph_us"),
                row.get("floor_us"),
            ]
        )
    heads = ["operation", "replays", "entries that differ", "beside the reference", "launches"]
    heads += ["allocations of a call", "of a replay", "warm call us", "warm replay us", "floor us"]
    return table(heads, rows)


def sanitizer_lines(result: Row) -> Lines:
    if "unavailable" in result:
        return [f"compute-sanitizer does not work here: {result['unavailable']}"]
    rows = [[row["tool"], row["kernels"], row["status"] == 0] for row in result.get("tools", [])]
    return table(["compute-sanitizer", "kernels", "nothing found"], rows)


def time_lines(result: Row) -> Lines:
    lines: Lines = []
    if result.get("bandwidth"):
        lines += [f"A copy reads and writes {result['bandwidth'] / 1e9:,.0f} GB a second.", ""]
    rows = []
    for row in result.get("rows", []):
        ours = row["fastdraft"]
        best = ours.get("graph_us", ours["eager_us"])
        peers = []
        for peer in ("plain", "flashinfer", "vllm"):
            times = [row[peer][key] for key in ("eager_us", "graph_us") if key in row.get(peer, {})]
            peers.append(min(times) if times else None)
        dtype = row["dtype"].removeprefix("torch.")
        size = [row["verb"], row["batch"], row["draft"], row["vocabulary"], dtype]
        floor = row["floor_us"]
        rows.append([*size, floor, ours["eager_us"], ours.get("graph_us"), best / floor, *peers])
    heads = ["operation", "batch", "draft", "vocabulary", "logits", "floor us", "eager us"]
    heads += ["graph us", "times the floor", "plain PyTorch us", "FlashInfer us", "vLLM us"]
    lines += table(heads, rows)
    if result.get("left_out"):
        lines += ["", f"{result['left_out']} cases did not fit into the time."]
    for peer in ("flashinfer", "vllm"):
        reasons = {row[peer].get("unavailable") for row in result.get("rows", []) if peer in row}
        lines += [line for reason in reasons - {None} for line in ("", f"{peer}: {reason}")]
    return lines


def attention_lines(result: Row) -> Lines:
    ways = ("fastdraft", "masked", "masked, grouped", "flex")
    rows, reasons = [], set()
    for row in result.get("rows", []):
        times = [row[way].get("graph_us", row[way].get("eager_us")) for way in ways]
        reasons |= {(way, row[way]["unavailable"]) for way in ways if "unavailable" in row[way]}
        sizes = [row["rows"], row["width"], row["context"]]
        ours = row["fastdraft"]
        errors = [f"{ours[name]:.1e}" for name in ("error", "replay_error") if name in ours]
        rows.append([*sizes, row["floor_us"], *times, ", ".join(errors)])
    heads = ["rows", "new tokens", "context", "floor us", *(f"{way} us" for way in ways)]
    lines = table([*heads, "error, of a replay too"], rows)
    if result.get("left_out"):
        lines += ["", f"{result['left_out']} cases did not fit into the time."]
    return lines + [line for way, why in sorted(reasons) for line in ("", f"{way}: {why}")]


def generation_lines(result: Row) -> Lines:
    lines = [f"Each number: {result.get('note')}.", ""]
    if result.get("context"):
        lines += [f"Random tokens lengthen prompts to {result['context']:,} tokens.", ""]
    rows = result.get("rows", [])
    plain: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if row["way"].startswith("plain") and "tokens_per_second" in row:
            key = row["model"], row["batch"], row["family"]
            plain[key] = max(plain.get(key, 0.0), row["tokens_per_second"])
    cells = []
    for row in rows:
        case = [row["model"], row["batch"], row.get("family"), row["way"]]
        if "unavailable" in row:
            cells.append([*case, row["unavailable"]])
            continue
        best = plain.get((row["model"], row["batch"], row["family"]))
        speed, peak = row["tokens_per_second"], row.get("peak_bytes")
        times = None if best is None else speed / best
        memory = None if peak is None else peak / 2**30
        steps = [row["forwards"], row["tokens_per_step"]]
        cells.append([*case, speed, times, *steps, memory, row["equal"]])
    heads = ["model", "batch", "requests", "way", "tokens/s", "times the better plain"]
    heads += ["steps", "tokens a step and row", "peak GiB", "output equal"]
    lines += table(heads, cells)
    left = [
        f"{each['model']} at batch {each['batch']}, {each['way']}"
        for each in result.get("left_out", [])
    ]
    return [*lines, "", f"Did not fit: {'; '.join(left)}."] if left else lines


def host_path_lines(result: Row) -> Lines:
    rows = []
    for row in result.get("transfers", []):
        where = ", ".join(f"{place} {count:.2f}" for place, count in row.get("places", {}).items())
        where = row.get("unavailable", where)
        rows.append([row["of"], row["batch"], row.get("steps"), row.get("waits_a_step"), where])
    heads = ["generation", "rows", "steps", "blocking transfers a step", "where"]
    lines = table(heads, rows)
    beside = result.get("beside_a_step")
    if beside is not None:
        ratio = beside["ratio"]
        lines += [
            "",
            f"A step takes {beside['without_ms']:.3f} ms without drafts and "
            f"{beside['with_ms']:.3f} ms with drafts aligned on the device: "
            f"{ratio['ratio']:.3f} times "
            f"({ratio['low']:.3f} to {ratio['high']:.3f}).",
        ]
    return lines


def no_sanitizer() -> str | None:
    if not torch.cuda.is_available():
        return "it needs a CUDA device"
    folder = "/usr/local/cuda/bin"
    path = f"{os.environ.get('PATH', '')}:{folder}"
    return None if shutil.which("compute-sanitizer", path=path) else "compute-sanitizer is not here"


def no_triton() -> str | None:
    return None if importlib.util.find_spec("triton") else "Triton is not installed"


PARTS = (
    Part(
        "correctness",
        "The kernels' tests, on the chip",
        "gpu_correctness.py",
        150,
        correctness_lines,
        rehearsal=("--rehearsal",),
        missing=no_triton,
    ),
    Part("graphs", "CUDA graphs", "gpu_graphs.py", 90, graph_lines, missing=no_triton),
    Part(
        "times",
        "Times of verification, caches cold, against one read of the logits",
        "verification.py",
        110,
        time_lines,
        rehearsal=("--device", "cpu"),
        takes_seconds=True,
    ),
    Part(
        "attention",
        "Attention of a step to a static cache, caches cold, against one read of what is seen",
        "attention.py",
        60,
        attention_lines,
        missing=no_triton,
        takes_seconds=True,
    ),
    Part(
        "generation",
        "Whole generations, with and without drafts",
        "gpu_generation.py",
        220,
        generation_lines,
        rehearsal=("--rehearsal",),
        takes_seconds=True,
        takes_data=True,
    ),
    Part(
        "host-path",
        "What a step waits for",
        "gpu_host_path.py",
        45,
        host_path_lines,
        rehearsal=("--rehearsal",),
        takes_data=True,
    ),
    Part(
        "sanitizers",
        "Sanitizers",
        "verification.py",
        120,
        sanitizer_lines,
        options=("--sanitize", "--quick"),
        rehearsal=None,
        missing=no_sanitizer,
    ),
)


def gpu() -> Row | None:
    """The GPU's name, driver and clocks, as they are found."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    found: Row = {
        "name": properties.name,
        "memory": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda or torch.version.hip,
    }
    fields = ("driver_version", *CLOCKS)
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as reason:
        return {**found, "clocks": f"nvidia-smi did not answer: {reason}"}
    values = asked.stdout.splitlines()[0].split(", ")
    return {**found, **dict(zip(fields, values, strict=False))}


def versions() -> dict[str, str | None]:
    """Of what takes part; None for what is not installed."""
    found: dict[str, str | None] = {}
    for name in (
        "fastdraft",
        "torch",
        "triton",
        "transformers",
        "numpy",
        "vllm",
        "flashinfer-python",
    ):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def run(
    part: Part, seconds: float, *, rehearsal: bool, folder: Path, options: Sequence[str] = ()
) -> Row:
    """Runs a part for at most `seconds`; how it ended, and what it had found until then.

    status: "passed"; "wrong", where results are not what they have to be; "error"; "out of time";
    or "not run".
    """
    chosen = part.rehearsal if rehearsal else part.options
    reason = part.missing()
    if chosen is None:
        reason = reason or "there is nothing to rehearse without a GPU"
    if reason is None and seconds < 5:
        reason = "no time was left"
    if reason is not None or chosen is None:
        return {"status": "not run", "reason": reason, "seconds": 0.0}
    file = folder / f"{part.name}.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / part.script), "--json", str(file), *chosen, *options]
    if part.takes_seconds:
        # So that it ends by itself, with what it has in order.
        command += ["--seconds", str(int(seconds * 0.8))]
    # What it has printed is in the log when it is stopped.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if rehearsal:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    begin = time.monotonic()
    log = folder / f"{part.name}.log"
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
    result: Row = {}
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
        lines = log.read_text("utf-8", errors="replace").splitlines()
        found["error"] = lines[-LAST_LINES:]
    return {**found, "result": result}


def page(report: Row) -> str:
    """The results as a page of Markdown."""
    device = report["gpu"]["name"] if report["gpu"] else "no GPU"
    lines = [f"# fastdraft on {device}", ""]
    if report["rehearsal"]:
        lines += [REHEARSED, ""]
    about = {key: report[key] for key in ("machine", "commit", "command")}
    about |= {key: value for key, value in (report["gpu"] or {}).items() if key != "name"}
    about |= {name: value or "not installed" for name, value in report["versions"].items()}
    lines += [*table(["", ""], [[key, str(value)] for key, value in about.items()]), ""]
    rows = [
        [name, part["status"], part.get("reason"), part["seconds"]]
        for name, part in report["parts"].items()
    ]
    lines += [*table(["part", "how it ended", "why", "seconds"], rows), ""]
    known = {part.name: part for part in PARTS}
    for name, found in report["parts"].items():
        lines += [f"## {known[name].title}", ""]
        if report["rehearsal"]:
            lines += [REHEARSED, ""]
        if "reason" in found:
            lines += [f"Not run: {found['reason']}.", ""]
        if found["status"] in ("out of time", "error", "wrong"):
            lines += [f"**{found['status'].capitalize()}.** Its last lines:", ""]
            lines += ["```text", *found["error"], "```", ""]
        if found.get("result"):
            lines += [*known[name].lines(found["result"]), ""]
    return "\n".join(lines)


def is_right(parts: Mapping[str, Row]) -> bool:
    """Nothing was wrong, and nothing broke."""
    return not any(part["status"] in ("wrong", "error") for part in parts.values())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [part.name for part in PARTS]
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=names,
        default=names,
        metavar="PART",
        help=f"which of {', '.join(names)}",
    )
    parser.add_argument("--data", type=Path, help="a folder of recorded requests (the sample)")
    parser.add_argument(
        "--generation", default="", metavar="OPTIONS", help="of bench/gpu_generation.py"
    )
    parser.add_argument("--rehearsal", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--seconds", type=float, help=f"in all (default: {SECONDS})")
    parser.add_argument(
        "--began", type=float, metavar="TIME", help="since when they count, in seconds of the epoch"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/gpu"), help="the folder to write to"
    )
    options = parser.parse_args(arguments)
    rehearsal = options.rehearsal or not torch.cuda.is_available()
    if rehearsal and options.out.resolve().is_relative_to(HERE / "results"):
        parser.error(f"a rehearsal's figures mean nothing, and may not lie in {options.out}")
    options.out.mkdir(parents=True, exist_ok=True)
    whole = options.seconds or SECONDS
    report = harness.about(
        rehearsal=rehearsal, gpu=None if rehearsal else gpu(), versions=versions(), parts={}
    )
    begin = time.monotonic()
    if options.began is not None:
        # What went before, as building the package, is in the time that was given to all.
        begin -= max(time.time() - options.began, 0.0)
    chosen = [part for part in PARTS if part.name in options.parts]
    for part in chosen:
        # What the parts before it have left is the last one's.
        left = max(whole - (time.monotonic() - begin), 0.0)
        bound = left if part is chosen[-1] else min(part.seconds, left)
        more = []
        if part.takes_data and options.data is not None:
            more += ["--data", str(options.data)]
        if part.name == "generation":
            more += shlex.split(options.generation)
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
