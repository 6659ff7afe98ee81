"""The coloured text of a request as an SVG image: self-contained, for light and dark pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from html import escape

from rich.cells import cell_len

from fastdraft.replay.trace import ORIGINS, TARGET, Trace

__all__ = ["picture"]

COLUMNS = 88
MOST_LINES = 20
"""A longer text is cut, and the image says so."""
CELL = 8.4
LINE = 24
SIDE = 24
FONT = 14

# By colour, and by the line below, for those who cannot tell the colours apart.
STYLE = """\
text { font: 14px ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; \
fill: #1f2328; white-space: pre }
.card { fill: #ffffff; stroke: #d0d7de }
.title { font-weight: 700 }
.note { fill: #57606a }
.context { fill: #c5efc9; stroke: #1a7f37 }
.prediction { fill: #f8e3a1; stroke: #9a6700 }
.datastore { fill: #c3e6fb; stroke: #0969da }
.draft { fill: #ead7fb; stroke: #8250df }
.prediction.line { stroke-dasharray: 6 3 }
.datastore.line { stroke-dasharray: 2 2 }
rect.mark { stroke: none }
.line { stroke-width: 2 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.card { fill: #0d1117; stroke: #30363d }
.note { fill: #9198a1 }
.context { fill: #12431f; stroke: #3fb950 }
.prediction { fill: #4d3a06; stroke: #d29922 }
.datastore { fill: #0c3a63; stroke: #58a6ff }
.draft { fill: #3c2465; stroke: #bc8cff }
}"""


def picture(trace: Trace) -> str:
    """The output of a request as an SVG image, each token coloured by where it came from.

    Below stand a legend and the counts. A text of more than `MOST_LINES` lines is cut.
    """
    lines = list(_lines(trace))
    left_out = len(lines) - MOST_LINES
    if left_out > 0:
        lines = [*lines[:MOST_LINES], [(TARGET, f"... {left_out:,} more lines")]]
    shapes: list[str] = []
    y = SIDE + FONT
    shapes.append(_text(0, y, trace.name, "title"))
    y += LINE + LINE // 2
    for line in lines:
        column = 0
        for origin, part in line:
            shapes += _part(column, y, origin, part)
            column += cell_len(part)
        y += LINE
    y += LINE // 2
    column = 0
    counts = Counter(trace.origins)
    for origin in ORIGINS:
        if counts[origin]:
            shapes += _part(column, y, origin, origin)
            shapes.append(_text(column + len(origin) + 1, y, str(counts[origin]), "note"))
            column += len(origin) + len(str(counts[origin])) + 4
    y += LINE
    shapes.append(_text(0, y, trace.summary, "note"))
    width, height = 2 * SIDE + round(COLUMNS * CELL), y + SIDE
    body = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-labelledby="title">\n'
        f'<title id="title">{_clean(f"{trace.name}: {trace.summary}")}</title>\n'
        f"<style>{STYLE}</style>\n"
        f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>\n'
        f"{body}\n</svg>\n"
    )


def _lines(trace: Trace) -> Iterator[list[tuple[str, str]]]:
    """The text broken into lines of at most `COLUMNS` cells, between words where it can be."""
    letters = [(letter, origin) for origin, part in trace.parts() for letter in part.expandtabs(4)]
    line: list[tuple[str, str]] = []
    width = 0
    for letter, origin in letters:
        if letter == "\n":
            yield _runs(line)
            line, width = [], 0
            continue
        cells = cell_len(letter)
        if width + cells > COLUMNS:
            blanks = [place for place, (each, _) in enumerate(line) if each == " "]
            # What stands before the first word stays with it.
            cut = blanks[-1] + 1 if blanks and blanks[-1] > COLUMNS // 2 else len(line)
            yield _runs(line[:cut])
            line = line[cut:]
            width = sum(cell_len(each) for each, _ in line)
        line.append((letter, origin))
        width += cells
    yield _runs(line)


def _runs(line: list[tuple[str, str]]) -> list[tuple[str, str]]:
    runs: list[tuple[str, str]] = []
    for letter, origin in line:
        if runs and runs[-1][0] == origin:
            runs[-1] = (origin, runs[-1][1] + letter)
        else:
            runs.append((origin, letter))
    return runs


def _part(column: int, y: int, origin: str, text: str) -> list[str]:
    shown = _text(column, y, text)
    if column == 0:
        # An indentation is no text to look at.
        column, text = len(text) - len(text.lstrip(" ")), text.lstrip(" ")
    if origin == TARGET or not text:
        return [shown]
    x, width = SIDE + column * CELL, cell_len(text) * CELL
    ends = f'x1="{x:.1f}" y1="{y + 5}" x2="{x + width:.1f}" y2="{y + 5}"'
    return [
        f'<rect class="{origin} mark" x="{x:.1f}" y="{y - 15}" width="{width:.1f}" height="20"/>',
        f'<line class="{origin} line" {ends}/>',
        shown,
    ]


def _text(column: int, y: int, text: str, kind: str = "") -> str:
    if not text.strip():
        return ""
    chosen = f' class="{kind}"' if kind else ""
    # Whatever the font, the text fills its cells.
    width = cell_len(text) * CELL
    return (
        f'<text{chosen} x="{SIDE + column * CELL:.1f}" y="{y}" xml:space="preserve" '
        f'textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs">{_clean(text)}</text>'
    )


def _clean(text: str) -> str:
    """Text as XML takes it: control characters and lone surrogates are replaced."""
    shown = "".join(
        letter if letter >= " " and letter not in "\ufffe\uffff" else "\ufffd" for letter in text
    )
    return escape(shown.encode("utf-8", "replace").decode(), quote=False)
