"""The text that `--show` prints of a request, as a self-contained SVG image."""

from __future__ import annotations

import io

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from fastdraft.replay.report import show_request
from fastdraft.replay.trace import Trace

__all__ = ["picture"]

COLUMNS = 88
MOST_LINES = 20
"""A longer text is cut, and the image says so."""
_INK = (31, 35, 40)
_NONE = (255, 255, 255)
_COLOURS = [_INK, _NONE, (197, 239, 201), (248, 227, 161), _NONE, (234, 215, 251), (195, 230, 251)]
_PAPER = TerminalTheme((255, 255, 255), _INK, [*_COLOURS, _NONE])
_FORMAT = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace; \
font-size: {char_height}px }}
{styles}
</style>
<defs>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def picture(trace: Trace) -> str:
    """The output of a request as an SVG image, coloured by the origin of its tokens."""
    console = Console(
        record=True, file=io.StringIO(), width=COLUMNS, highlight=False, emoji=False,
        force_terminal=True, color_system="standard", legacy_windows=False,
    )  # fmt: skip
    show_request(console, trace, most_lines=MOST_LINES)
    svg = console.export_svg(title="", theme=_PAPER, code_format=_FORMAT, unique_id="answer")
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"
