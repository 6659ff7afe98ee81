"""The texts of repr() for objects of the C++ module, which calls this."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastdraft.engine import Draft, DraftBatch, Engine, Offers

__all__ = ["amount", "batch", "draft", "engine", "offers", "size"]

MOST_TOKENS = 16
"""The number of tokens that are shown; of a longer draft the first ones."""


def amount(count: int, noun: str) -> str:
    """A number and its noun: "1 token", "2,000 tokens"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size(num_bytes: int) -> str:
    """Bytes in the largest unit that leaves a digit before the point."""
    value, units = float(num_bytes), ("bytes", "kB", "MB", "GB")
    for unit in units:
        if value < 1000 or unit == units[-1]:
            return f"{value:.0f} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


def engine(self: Engine) -> str:
    """`Engine.__repr__`."""
    running = f"{amount(self.num_requests, 'request')} running, {size(self.num_bytes)}"
    return f"<{type(self).__name__} {self.config!r}, {running}>"


def draft(self: Draft) -> str:
    """`Draft.__repr__`."""
    tokens = self.tolist()
    if not tokens:
        return "<Draft of no tokens>"
    shown = f"<Draft {_cut(tokens)}"
    parents = self.parents.tolist()
    if parents != list(range(-1, len(tokens) - 1)):
        shown += f", parents={_cut(parents)}"
    probabilities = [round(each, 3) for each in self.probabilities.tolist()]
    return f"{shown}, probabilities={_cut(probabilities)}, sources={', '.join(_sources(self))}>"


def batch(self: DraftBatch) -> str:
    """`DraftBatch.__repr__`."""
    rows = self.tolist()
    tokens = amount(sum(map(len, rows)), "token")
    return f"<DraftBatch of {amount(len(rows), 'row')}, {tokens}: {_cut(list(map(_cut, rows)))}>"


def offers(self: Offers) -> str:
    """`Offers.__repr__`."""
    rows = amount(len(self.offsets) - 1, "row")
    return f"<Offers of {self.kind!r}, {rows}: {_cut(self.token_ids.tolist())}>"


def _sources(self: Draft) -> list[str]:
    from fastdraft.engine import source_name

    return list(dict.fromkeys(map(source_name, self.sources.tolist())))


def _cut(values: list[object] | list[int] | list[float] | list[str]) -> str:
    shown = [str(value) for value in values[:MOST_TOKENS]]
    return f"[{', '.join([*shown, '...'] if len(values) > MOST_TOKENS else shown)}]"
