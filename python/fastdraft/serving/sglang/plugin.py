"""The algorithm FASTDRAFT in SGLang's registry: its n-gram worker, with a `Corpus`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.metadata import version
from typing import Any, Final

from fastdraft.errors import InvalidValueError
from fastdraft.serving.ledger import Ledger, share_folder
from fastdraft.serving.metrics import Totals, prometheus
from fastdraft.serving.sglang.corpus import Corpus
from fastdraft.serving.sglang.coupled import coupled, replaced
from fastdraft.serving.sglang.environment import is_set, ranks_of
from fastdraft.serving.sglang.middleware import mount
from fastdraft.serving.sglang.texts import END

__all__ = ["NAME", "register"]

NAME: Final = "FASTDRAFT"
"""The value of `--speculative-algorithm`."""


def register() -> None:
    """Registers the algorithm with SGLang; its plugin loader calls this in every process."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    try:
        SpeculativeAlgorithm.from_string(NAME)
    except ValueError:
        pass
    else:
        return

    if not hasattr(CustomSpecAlgo, "handle_server_args"):
        # Such a version's n-gram worker knows no overlapping steps, and its arguments no plugin.
        SpeculativeAlgorithm.register(NAME, validate_server_args=_refuse)(_refuse)
        return

    as_ngram = SpeculativeAlgorithm.NGRAM

    class Algorithm(CustomSpecAlgo):  # type: ignore[misc]
        """For the host this is n-gram speculation; only the drafts differ."""

        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

        def handle_server_args(self, server_args: Any) -> None:
            if server_args.speculative_ngram_external_corpus_path is not None:
                raise InvalidValueError(
                    "speculative_ngram_external_corpus_path must be None for FASTDRAFT, which "
                    "takes the files of `fastdraft datastore build` in FASTDRAFT_DATASTORES, got "
                    f"{server_args.speculative_ngram_external_corpus_path!r}"
                )
            as_ngram.handle_server_args(server_args)
            share_folder()
            mount()

        def __getattr__(self, name: str) -> Any:
            # The scheduler asks more of an algorithm than the base class answers.
            if name.startswith("_"):
                raise AttributeError(name)
            return getattr(as_ngram, name)

    register_factory = SpeculativeAlgorithm.register(
        NAME, supports_overlap=True, spec_class=Algorithm
    )
    register_factory(lambda _server_args: _worker())


def _refuse(_server_args: Any) -> Any:
    raise InvalidValueError(f"{NAME} needs SGLang 0.5.23 or newer, got {version('sglang')}")


@functools.cache
def _worker() -> type:
    # Imported here: only the process that runs the model has the kernels that this needs.
    from sglang.srt.speculative import ngram_worker

    class FastdraftWorker(ngram_worker.NGRAMWorker):  # type: ignore[misc]
        """SGLang's n-gram worker, whose corpus is a `Corpus`."""

        def __init__(self, server_args: Any, *args: Any, target_worker: Any, **kwargs: Any) -> None:
            corpus = functools.partial(
                Corpus,
                vocabulary=target_worker.model_runner.model_config.vocab_size,
                server_args=server_args,
                report=_report(server_args),
                ledger=_ledger(server_args),
            )
            # The worker's own would compile code first, and allocate a table of a million nodes.
            with replaced(ngram_worker, NgramCorpus=corpus):
                super().__init__(server_args, *args, target_worker=target_worker, **kwargs)
            self._sampling: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
            if is_set("FASTDRAFT_COUPLED_ACCEPTANCE", default=False):
                sample = coupled(target_worker.model_runner.sampler, server_args)
                self._sampling = functools.partial(replaced, ngram_worker, eagle_sample=sample)
            # How many last tokens of a text the corpus gets: all that one step can add, and those
            # that successors need.
            self.max_trie_depth = max(self.draft_token_num, END)

        def _prepare_draft_tokens(self, batch: Any) -> Any:
            self.ngram_corpus.begin(batch.reqs)
            return super()._prepare_draft_tokens(batch)

        def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            verifies = batch.forward_mode.is_decode()
            with self._sampling():
                result = super().forward_batch_generation(batch, *args, **kwargs)
            if verifies:
                self.ngram_corpus.verified(result.logits_output.next_token_logits)
            return result

        def _update_ngram_corpus(self, batch: Any) -> None:
            """Nothing: the corpus takes in what was emitted with its next call."""

    return FastdraftWorker


def _ledger(server_args: Any) -> Ledger | None:
    """The ledger of predictions' counts, for the server's front; None on further ranks."""
    if ranks_of(server_args) > 1:
        from sglang.srt.runtime_context import get_parallel

        if get_parallel().tp_rank:
            return None
    return Ledger.from_environment()


def _report(server_args: Any) -> Callable[[Totals], None] | None:
    """Puts totals among the host's own metrics; None where it has none, and on further ranks."""
    if not getattr(server_args, "enable_metrics", False):
        return None
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.tp_rank:
        return None
    engine = str(parallel.dp_rank or 0)
    return lambda totals: prometheus().report(engine, totals)
