"""`transformers serve` with drafts: `python -m fastdraft.serving.transformers_serve MODEL`.

Its options are those of `transformers serve`. `FASTDRAFT_MEMORY_BYTES` in the environment bounds
the memory of earlier requests of each model, and `FASTDRAFT_NGRAMS` names a table of n-grams.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from transformers.cli.serving import model_manager, server, utils

from fastdraft import Datastore, DraftConfig, Engine, NgramTable, hf
from fastdraft.hf.vocabulary import vocabulary_size
from fastdraft.memory.common_ngrams import default_ngrams
from fastdraft.serving.handover import ASKED, Asked
from fastdraft.serving.http.front import Front
from fastdraft.serving.http.servers import TRANSFORMERS
from fastdraft.serving.request_options import MOST_IDS, request_options
from fastdraft.serving.settings import (
    COMMON_NGRAMS,
    memory_bytes_of_environment,
    ngrams_of_environment,
)

__all__ = ["main", "mount"]


def mount() -> None:
    """Has the server draft, and take predictions; before it starts, and once a process."""
    memory_bytes_of_environment()  # a bad value is an error now
    build, load = server.build_server, model_manager.ModelManager.load_model_and_processor
    configure = utils.BaseHandler._build_generation_config

    @functools.wraps(build)
    def built(*args: Any, **kwargs: Any) -> Any:
        app = build(*args, **kwargs)
        app.add_middleware(Front, server=TRANSFORMERS)
        return app

    @functools.wraps(load)
    def loaded(*args: Any, **kwargs: Any) -> Any:
        model, processor = load(*args, **kwargs)
        decodes = hasattr(model, "generate") and not model.config.is_encoder_decoder
        if decodes and "generate" not in vars(model):
            vars(model)["generate"] = _Generate(model, processor)
        return model, processor

    @functools.wraps(configure)
    def configured(*args: Any, **kwargs: Any) -> Any:
        config = configure(*args, **kwargs)
        if not kwargs.get("use_cb"):  # continuous batching has no drafts
            # Generation runs in a thread of its own, in another context than the request.
            vars(config)["fastdraft"] = ASKED.get()
        return config

    for holder, name, call in (
        (server, "build_server", built),
        (model_manager.ModelManager, "load_model_and_processor", loaded),
        (utils.BaseHandler, "_build_generation_config", configured),
    ):
        setattr(holder, name, call)


class _Generate:
    """Replaces a model's `generate`."""

    def __init__(self, model: Any, processor: Any) -> None:
        self._model = model
        ngrams: NgramTable | str | None = ngrams_of_environment()
        if ngrams == COMMON_NGRAMS:
            tokenizer = getattr(processor, "tokenizer", processor)
            ngrams = default_ngrams(tokenizer, vocabulary_size(model))
        config = DraftConfig(ngrams=ngrams)
        self._apart = Engine(config)
        max_bytes = memory_bytes_of_environment()
        stores = [Datastore(max_bytes=max_bytes)] if max_bytes else []
        self._engine = Engine(config, datastores=stores)

    def __call__(
        self, *args: Any, generation_config: Any = None, tokenizer: Any = None, **kwargs: Any
    ) -> Any:
        asked = vars(generation_config or Asked()).pop("fastdraft", None) or Asked()
        options = request_options(asked.params)
        kwargs |= {"generation_config": generation_config, "tokenizer": tokenizer}
        if not options.lookahead or tokenizer is None:
            return type(self._model).generate(self._model, *args, **kwargs)
        prediction = options.prediction
        if asked.prediction is not None:
            text = getattr(tokenizer, "tokenizer", tokenizer)
            prediction = text(asked.prediction, add_special_tokens=False).input_ids[:MOST_IDS]
        streamer = kwargs.get("streamer")
        if streamer is not None:
            kwargs["streamer"] = _Held(streamer)
        # There is one memory, so that a request of a namespace is kept from it.
        shares = options.remember and options.namespace is None
        drafter = self._engine if shares else self._apart
        output = hf.generate(
            self._model,
            *args,
            drafter=drafter,
            prediction=prediction,
            templates=options.templates,
            **kwargs,
        )
        stats = output.stats
        asked.counts = stats.accepted_prediction_tokens, stats.rejected_prediction_tokens
        if streamer is not None:
            streamer.end()
        return output.sequences


class _Held:
    """A streamer whose end is called later: the counts must be there first."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer

    def put(self, value: Any) -> None:
        self._streamer.put(value)

    def end(self) -> None:
        """Nothing."""


def main() -> None:
    """Runs `transformers serve` with drafts, with the arguments of this command."""
    mount()
    from transformers.cli.transformers import main as command

    sys.argv = ["transformers", "serve", *sys.argv[1:]]
    command()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
