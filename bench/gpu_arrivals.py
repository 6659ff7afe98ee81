"""Whether the last program to arrive sees what the others left: one launch against two.

Both draw from the same logits, and have to agree bit for bit, thousands of times in CUDA graphs,
half of them beside a stream that keeps the memory busy. The first finishes in the program that
arrives last, the second in a launch of its own. Sanitizers see races in shared memory alone.

    python bench/gpu_arrivals.py --json arrivals.json
    TRITON_INTERPRET=1 python bench/gpu_arrivals.py --rehearsal
"""

from __future__ import annotations

import sys
import time
from functools import partial
from unittest import mock

import torch

import harness
from fastdraft.kernels import grid, language, sampled
from fastdraft.kernels.operands import Batch, Sampling, Verified, Warpers
from fastdraft.kernels.workspace import BUFFERS, Scratch, Workspace, take_output

WAIT = 500  # replays between two waits for the device


def in_two_launches(batch: Batch, sampling: Sampling) -> Verified:
    names = "row_arrivals", "chunk_maximum", "chunk_sum", "row_results", "request_arrivals"
    scratch, output = Scratch.take(batch, *names), take_output(batch)
    sampled.leave_statistics(batch, sampling, scratch)
    grid.run(
        sampled.draw_kernel, len(batch.logits), batch, sampling, scratch=scratch, output=output
    )
    return output


def stress(device: torch.device, seconds: float, *, rehearsal: bool) -> harness.Row:
    requests, draft, vocabulary, replays = (
        (1, 1, 5000, 2) if rehearsal else (64, 4, 151_936, 20_000)
    )
    rows = requests * (draft + 1)
    random = torch.Generator(device).manual_seed(0)
    logits = torch.empty(rows, vocabulary, dtype=torch.bfloat16, device=device)
    logits.normal_(0, 2.5, generator=random)
    ids = torch.randint(vocabulary, (requests * draft,), generator=random, device=device)
    seeds = torch.randint(2**62, (requests,), generator=random, device=device)
    positions = torch.zeros_like(seeds)
    sampling = Sampling(Warpers(torch.full((requests,), 0.8, device=device)), seeds, positions)
    size = {"max_rows": rows, "max_requests": requests, "max_draft": draft}
    one, two = (Workspace(device, vocabulary=vocabulary, **size) for _ in range(2))
    offsets = torch.arange(requests + 1, device=device) * draft
    batch = Batch(logits, ids, offsets, draft, logprobs=True)
    differences = torch.zeros((), dtype=torch.int64, device=device)

    def step() -> None:
        # Other logits at each row, other noise, other drafts.
        logits.copy_(torch.roll(logits, 1, 0))
        positions.add_(1)
        ids.copy_((ids + 1) % vocabulary)
        fused = sampled.launch(batch._replace(workspace=one), sampling)
        split = in_two_launches(batch._replace(workspace=two), sampling)
        assert fused.logprobs is not None and split.logprobs is not None
        differences.add_((fused.token_ids != split.token_ids).sum())
        differences.add_((fused.lengths != split.lengths).sum())
        bits = [
            each.logprobs.view(torch.int32) for each in (fused, split) if each.logprobs is not None
        ]
        differences.add_((bits[0] != bits[1]).sum())

    step()
    replay = step
    beside, busy = None, torch.empty(0 if rehearsal else 1 << 28, dtype=torch.uint8, device=device)
    if not rehearsal:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        replay = graph.replay
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    begin, done = time.monotonic(), 0
    while done < replays and time.monotonic() - begin < seconds:
        if beside is not None and done % 2:
            with torch.cuda.stream(beside):
                busy.add_(1)
        replay()
        done += 1
        if not rehearsal and done % WAIT == 0:
            torch.cuda.synchronize()
    left = [
        int(workspace.take(name, workspace.size).count_nonzero())
        for workspace in (one, two)
        for name, buffer in BUFFERS.items()
        if buffer.zero
    ]
    wrong, counters = int(differences), sum(left)
    correct = not wrong and not counters
    return {"correct": correct, "replays": done, "differences": wrong, "counters_left": counters}


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--rehearsal", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--seconds", type=float, default=60, help="end after so long")
    options = parser.parse_args()
    device = torch.device("cpu" if options.rehearsal else "cuda")
    run = partial(stress, device, options.seconds, rehearsal=options.rehearsal)
    if options.rehearsal:
        with mock.patch.object(language, "has_kernels", return_value=True):
            found = run()
    else:
        found = run()
    harness.finish(options, {**harness.about(device=str(device)), **found})
    print(found)
    return 0 if found["correct"] else 1


if __name__ == "__main__":
    sys.exit(main())
