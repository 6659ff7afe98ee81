"""One replayed request to look at: each output token coloured by where it came from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from fastdraft.cli.records import Record
from fastdraft.cli.replay_run import TARGET, FamilyResult

__all__ = ["show_request"]

# Where there are colours they tell where a token came from, elsewhere brackets do. The first origin
# is the target's own; the others take a look each, in the order in which they come up.
LOOKS = (
    ("black on green", "⟦", "⟧"),
    ("black on cyan", "«", "»"),
    ("black on yellow", "[", "]"),
    ("black on magenta", "{", "}"),
)


def show_request(
    console: Console,
    title: str,
    record: Record,
    origins: Sequence[str],
    result: FamilyResult,
    decode: Callable[[list[int]], str] | None,
) -> None:
    """Prints the output of a record, a legend, and how many steps it took.

    Args:
        console: Where to.
        title: Which drafter.
        record: The request.
        origins: Where each token of its output came from.
        result: Its counts.
        decode: Turns token ids into text; without it the ids are printed.
    """
    console.print()
    console.rule(Text(f"{record.id}: {title}", "bold"), align="left")
    found = [origin for origin in dict.fromkeys(origins) if origin != TARGET]
    looks = {origin: LOOKS[place % len(LOOKS)] for place, origin in enumerate(found)}
    looks[TARGET] = ("", "", "")
    if console.color_system is not None:
        looks = {origin: (style, "", "") for origin, (style, _, _) in looks.items()}

    def marked(text: Text, part: str, origin: str) -> None:
        style, opening, closing = looks[origin]
        text.append(f"{opening}{part}{closing}", style)

    output = record.output_ids.tolist()
    text = Text()
    shown, end = "", 0
    for origin, group in groupby(origins):
        start, end = end, end + len(list(group))
        if decode is None:
            part = ("" if start == 0 else " ") + " ".join(map(str, output[start:end]))
        else:
            # Decoding a prefix keeps characters of several tokens whole, and spaces between words.
            prefix = decode(output[:end])
            if end < len(output):
                prefix = prefix.rstrip("\ufffd")
            part, shown = prefix[len(shown) :], prefix
        marked(text, part, origin)
    console.print(text)
    console.print()
    counts = Counter(origins)
    legend = Text("Tokens from: ")
    for origin in (TARGET, *found):
        marked(legend, origin, origin)
        legend.append(f" {counts[origin]}   ")
    console.print(legend)
    console.print(
        f"{len(output)} tokens, {result.steps} steps after the prefill, "
        f"{result.tokens_per_step:.2f} tokens a step; "
        f"drafted {result.drafted}, accepted {result.accepted}"
    )
