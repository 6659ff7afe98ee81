"""A drafter with the options that it is replayed with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastdraft import Datastore, DraftConfig, Engine, NgramTable
from fastdraft.replay.peers import PEERS, EnginePeer, Peer
from fastdraft.replay.records import Record

__all__ = ["DRAFTERS", "Setting", "settings_of"]

DRAFTERS = ("default", "prompt-lookup", "ngram", "predicted-outputs")
"""The engine's drafters by their names; those of `PEERS` come beside them."""


_LOOKAHEAD = 16  # of those that do not act on the cost


@dataclass(frozen=True)
class Setting:
    """The drafter of a replay, and its settings.

    Attributes:
        drafter: Its name.
        token_costs: One, or several where the drafter does not act on it.
        lookahead: Its longest draft.
        tree_budget: The most nodes of its trees, None for chains.
        make: Makes the drafter for a family whose longest request has the given number of tokens.
        curve: Instead of the cost, the time of a step of 1, 2, ... tokens.
    """

    drafter: str
    token_costs: tuple[float, ...]
    lookahead: int
    tree_budget: int | None
    make: Callable[[int], Peer]
    curve: Sequence[float] | None = None

    @property
    def title(self) -> str:
        """The drafter, and the cost where it acts on one."""
        if self.curve is not None:
            return f"{self.drafter}, a first draft token at {self.token_costs[0]:.1%}"
        if len(self.token_costs) > 1:
            return self.drafter
        return f"{self.drafter}, token cost {self.token_costs[0]:g}"

    def start(self, records: Sequence[Record]) -> Peer:
        """A fresh drafter for a family."""
        return self.make(max(len(each.prompt_ids) + len(each.output_ids) for each in records))


def settings_of(
    drafter: str = "default",
    *,
    token_costs: Sequence[float] = (0.02,),
    curve: Sequence[float] | None = None,
    lookahead: int | None = None,
    tree_budget: int | None = None,
    memory: bool = True,
    datastores: Sequence[Datastore] = (),
    ngrams: NgramTable | None = None,
) -> list[Setting]:
    """The settings of a drafter: one for each token cost if it acts on them, else one for all.

    Args:
        drafter: One of `DRAFTERS` or `PEERS`.
        token_costs: What a draft token costs, as fractions of a step.
        curve: Instead of these, the time of a step of 1, 2, ... tokens, as multiples of that of
            one token.
        lookahead: Its longest draft; by default `DraftConfig`'s for the default drafter, 16 for all
            others, which draft as much whatever it costs.
        tree_budget: Makes the default drafter draft trees of at most this many tokens.
        memory: Whether the engine may draft from earlier requests of a family.
        datastores: What else it may draft from; they stay as they are.
        ngrams: A table of n-grams for the default drafter.

    Raises:
        KeyError: No drafter has this name.
    """
    costs = tuple(dict.fromkeys(token_costs if curve is None else [curve[1] - 1]))
    if lookahead is None:
        lookahead = DraftConfig().lookahead if drafter == "default" else _LOOKAHEAD

    def engine(config: DraftConfig) -> Callable[[int], Peer]:
        def make(_: int) -> Peer:
            live = [Datastore()] if memory else []
            return EnginePeer(Engine(config, datastores=[*live, *datastores]), curve)

        return make

    if drafter == "default":
        return [
            Setting(
                drafter,
                (cost,),
                lookahead,
                tree_budget,
                engine(
                    DraftConfig(
                        lookahead=lookahead,
                        token_cost=cost,
                        tree_budget=tree_budget,
                        ngrams=ngrams,
                    )
                ),
                curve,
            )
            for cost in costs
        ]
    if drafter in PEERS:
        peer = PEERS[drafter]
        return [Setting(drafter, costs, lookahead, None, lambda n: peer(lookahead, n), curve)]
    config = {
        "prompt-lookup": lambda: DraftConfig.prompt_lookup(num_tokens=lookahead),
        "ngram": lambda: DraftConfig.ngram(lookahead=lookahead),
        "predicted-outputs": lambda: DraftConfig.predicted_outputs(lookahead=lookahead),
    }[drafter]()
    return [Setting(drafter, costs, config.lookahead, None, engine(config), curve)]
