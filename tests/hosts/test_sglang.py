"""The FASTDRAFT algorithm against SGLang's own package, on a machine without CUDA.

What SGLang has in Python runs as it is: the loader of its plugins, its arguments, its registry, its
requests and its n-gram worker. Two things stand in for a device: its compiled kernels are here in
PyTorch, by what its source says of them, and the target says what a script has it say.
"""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import logging
import os
import random
import runpy
import subprocess
import sys
import threading
import types
import warnings
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from doctor import line_of
from fastdraft import Datastore
from fastdraft.cli import doctor
from fastdraft.errors import InvalidValueError
from fastdraft.serving import sglang as adapter
from fastdraft.serving.http.front import Front
from fastdraft.serving.ledger import FOLDER_VARIABLE, Ledger
from fastdraft.serving.metrics import SOURCES, hits_field
from fastdraft.serving.sglang.middleware import mount

TORCHVISION_ON_CPU = Path(__file__).parents[1] / "support" / "torchvision_on_cpu"

pytestmark = pytest.mark.filterwarnings("ignore")

_NODES = 12


def _reconstruct_indices_from_tree_mask(
    mask: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    rows: int,
    nodes: int,
) -> None:
    trees = mask.view(rows, nodes, nodes).bool().tolist()
    for row, tree in enumerate(trees):
        above = [[other for other in range(node) if tree[node][other]] for node in range(nodes)]
        parents = [nodes_above[-1] if nodes_above else -1 for nodes_above in above]
        for node in range(nodes):
            positions[row * nodes + node] = seq_lens[row] + len(above[node])
            retrieve_index[row, node] = row * nodes + node
            later = range(node + 1, nodes)
            next_token[row, node] = next((n for n in later if node in above[n]), -1)
            next_sibling[row, node] = next(
                (n for n in later if node > 0 and parents[n] == parents[node]), -1
            )


def _verify_tree_greedy(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    for row in range(len(candidates)):
        at = count = 0
        accept_index[row, 0] = retrive_index[row, 0]
        while True:
            wanted = target_predict[row, at]
            predicts[retrive_index[row, at]] = wanted
            node = int(retrive_next_token[row, at])
            while node >= 0 and candidates[row, node] != wanted:
                node = int(retrive_next_sibling[row, node])
            if node < 0:
                break
            at, count = node, count + 1
            accept_index[row, count] = retrive_index[row, at]
        accept_token_num[row] = count


def _assign_extend_cache_locs(
    rows: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    _width: int,
) -> None:
    parts = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
    found = torch.cat([slots[row, start:end] for row, start, end in parts])
    out[: len(found)] = found


def _fill_accept_out_cache_loc(index: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    found = slots[index.flatten()[index.flatten() >= 0].long()]
    out[: len(found)] = found


def _murmur_hash32(
    seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """Of (rows,), (rows,) and (columns,): (rows, columns), uint32."""
    word = 0xFFFFFFFF

    def rotated(x: torch.Tensor, bits: int) -> torch.Tensor:
        return (x << bits | x >> 32 - bits) & word

    seeds, positions, columns = (each.long() for each in (seeds, positions, columns))
    found = torch.zeros(len(seeds), len(columns), dtype=torch.int64)
    for part in (seeds[:, None], seeds[:, None] >> 32, positions[:, None], columns):
        mixed = rotated((part & word) * 0xCC9E2D51 & word, 15) * 0x1B873593 & word
        found = (rotated(found ^ mixed, 13) * 5 + 0xE6546B64) & word
    found ^= 16
    for bits, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        found = (found ^ found >> bits) * factor & word
    return (found ^ found >> 16).to(torch.uint32)


_KERNELS: dict[str, Callable[..., None]] = {
    "assign_extend_cache_locs_cpu": _assign_extend_cache_locs,
    "fill_accept_out_cache_loc_cpu": _fill_accept_out_cache_loc,
    "reconstruct_indices_from_tree_mask": _reconstruct_indices_from_tree_mask,
    "verify_tree_greedy_cpu": _verify_tree_greedy,
}


def _kernel(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name}")

    return _KERNELS.get(name, absent)


@pytest.fixture(scope="session", autouse=True)
def package() -> Path:
    """SGLang's folder, once it can be imported."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    for name in ("sgl_kernel", "sgl_kernel.speculative"):
        module = types.ModuleType(name)
        module.__path__ = []
        module.__getattr__ = _kernel  # type: ignore[method-assign]
        sys.modules[name] = module
    torch.library.define(
        "sgl_kernel::murmur_hash32_cpu", "(Tensor a, Tensor b, Tensor c) -> Tensor"
    )
    torch.library.impl("sgl_kernel::murmur_hash32_cpu", "cpu", _murmur_hash32)
    runpy.run_path(str(TORCHVISION_ON_CPU / "sitecustomize.py"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sglang = importlib.import_module("sglang")
        plugins = importlib.import_module("sglang.srt.plugins")
        importlib.import_module("sglang.srt.speculative.ngram_worker")
        plugins.load_plugins()
    return Path(sglang.__file__).parent


@pytest.fixture(scope="session")
def model(words: Path) -> str:
    """A folder with a configuration and a tokenizer: nobody reads its weights."""
    return str(words)


@pytest.fixture(scope="session")
def texts(model: str) -> list[tuple[list[int], list[int]]]:
    """Prompts and outputs as token ids: rewritten source files, each with an edit or two."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    found = []
    for name in ("bisect", "colorsys", "fnmatch", "heapq", "keyword", "shlex", "stat", "textwrap"):
        old = inspect.getsource(importlib.import_module(name))[:700]
        new = old.replace("self", "this").replace("return", "yield", 2)
        prompt = f"Rewrite this file.\n```python\n{old}```\n"
        found.append((tokenizer.encode(prompt).ids, tokenizer.encode(new).ids))
    return found


@pytest.fixture
def algorithm() -> Any:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    return SpeculativeAlgorithm.from_string("fastdraft")


@pytest.fixture
def corpus() -> adapter.Corpus:
    return adapter.Corpus(draft_token_num=_NODES)


def _req(rid: str, prompt: Sequence[int], **params: Any) -> Any:
    """One of SGLang's own requests."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    salts = {
        name: params.pop(name) for name in ("cache_salt", "extra_key", "lora_id") if name in params
    }
    names = "temperature", "top_p", "top_k", "sampling_seed"
    own = {name: params.pop(name) for name in names if name in params}
    own = {"temperature": 0, "max_new_tokens": params.pop("max_new_tokens", 128), **own}
    sampling = SamplingParams(**own, custom_params=params or None)
    sampling.normalize(None)
    return Req(rid, "", array("q", prompt), sampling, **salts)


def _ask(corpus: adapter.Corpus, reqs: Sequence[Any]) -> tuple[list[list[int]], Any]:
    """What the corpus drafts for requests whose output is all in the host's list."""
    corpus.begin(reqs)
    whole = [[*req.origin_input_ids, *req.output_ids] for req in reqs]
    tokens, mask = corpus.batch_get(
        [req.rid for req in reqs], [text[-_NODES:] for text in whole], [len(t) for t in whole]
    )
    return tokens.reshape(len(reqs), -1).tolist(), mask.reshape(len(reqs), _NODES, _NODES)


def _parents(mask: Any) -> list[int]:
    above = [np.flatnonzero(mask[node, :node]) for node in range(len(mask))]
    return [int(nodes[-1]) if len(nodes) else -1 for nodes in above]


# --- What the host asks of an algorithm ---


def test_the_plugin_loader_registers_it(algorithm: Any) -> None:
    from importlib.metadata import entry_points

    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    [entry] = [e for e in entry_points(group="sglang.srt.plugins") if e.name == "fastdraft"]
    assert entry.value == "fastdraft.serving.sglang:register"
    assert isinstance(algorithm, CustomSpecAlgo)
    assert algorithm.name == adapter.NAME
    assert algorithm.supports_overlap
    adapter.register()  # again: the loader runs in every process, and in some of them twice


def test_it_answers_as_ngram_does(algorithm: Any) -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    asked = {
        name
        for name in vars(SpeculativeAlgorithm)
        if name.startswith(("is_", "supports_", "has_", "need", "carries_"))
    }
    assert {"is_ngram", "need_topk", "carries_draft_hidden_states", "has_draft_kv"} <= asked
    answers = {name: getattr(algorithm, name)() for name in asked}
    assert answers == {name: getattr(SpeculativeAlgorithm.NGRAM, name)() for name in asked}


def test_it_has_all_that_the_package_asks_an_algorithm(algorithm: Any, package: Path) -> None:
    asked = set()
    for path in (package / "srt").rglob("*.py"):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)) if "spec_algo" in source else ():
            if isinstance(node, ast.Attribute):
                whose = node.value
                name = getattr(whose, "attr", getattr(whose, "id", ""))
                if name in ("spec_algorithm", "spec_algo"):
                    asked.add(node.attr)
    assert {"create_future_map", "create_worker", "is_ngram"} <= asked
    assert [name for name in sorted(asked) if not hasattr(algorithm, name)] == []


def test_a_copy_of_it_is_not_ngram(algorithm: Any) -> None:
    import copy

    assert copy.deepcopy(algorithm).name == adapter.NAME


def test_the_future_map_is_the_one_of_ngram(algorithm: Any) -> None:
    pool = types.SimpleNamespace(req_to_token=torch.zeros(4, 16, dtype=torch.int32))
    future = algorithm.create_future_map(torch.device("cpu"), pool)
    assert future.spec_algo.is_ngram()


def _arguments(model: str, **options: Any) -> Any:
    from sglang.srt.server_args import ServerArgs

    chosen = {"device": "cpu", "page_size": 1, "speculative_algorithm": "fastdraft", **options}
    return ServerArgs(model_path=model, **chosen)


def _resolved(model: str, **options: Any) -> Any:
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.arg_groups.speculative_hook import handle_speculative_decoding

    arguments = _arguments(model, **options)
    handle_speculative_decoding(arguments)
    return resolving_view(arguments)


def test_arguments_are_resolved_as_for_ngram(model: str) -> None:
    ours, ngrams = (_resolved(model, speculative_algorithm=name) for name in ("FASTDRAFT", "NGRAM"))
    assert ours.speculative_algorithm == "FASTDRAFT"
    for name in (
        "disable_overlap_schedule",
        "enable_mixed_chunk",
        "max_running_requests",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
        "speculative_num_steps",
    ):
        assert getattr(ours, name) == getattr(ngrams, name), name
    assert ours.speculative_num_draft_tokens == 12
    assert not ours.enable_mixed_chunk


def test_trees_need_what_the_host_needs_for_them(model: str) -> None:
    with pytest.raises(ValueError, match=r"page_size\(16\) > 1"):
        _resolved(model, page_size=16)
    assert _resolved(model, page_size=16, speculative_ngram_max_bfs_breadth=1)


def test_a_corpus_of_the_hosts_own_kind_is_refused(model: str) -> None:
    with pytest.raises(InvalidValueError, match=r"FASTDRAFT_DATASTORES, got '/corpus\.jsonl'"):
        _resolved(model, speculative_ngram_external_corpus_path="/corpus.jsonl")


# --- What the worker asks of a corpus ---


def test_the_worker_calls_nothing_that_the_corpus_lacks(package: Path) -> None:
    source = (package / "srt/speculative/ngram_worker.py").read_text()
    worker = next(
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "NGRAMWorker"
    )
    methods = {node.name: node for node in worker.body if isinstance(node, ast.FunctionDef)}
    # Reached by requests that the host takes for its own algorithm alone.
    external = {name for name in methods if "corpus_" in name or "external" in name}
    called = {
        node.attr
        for name, method in methods.items()
        if name not in external
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "ngram_corpus"
    }
    assert {"batch_get", "batch_put", "erase_match_state", "reset", "synchronize"} <= called
    assert [name for name in sorted(called) if not hasattr(adapter.Corpus, name)] == []
    # What the worker overrides is there to be overridden, and the corpus is made by this name.
    assert {"_prepare_draft_tokens", "_update_ngram_corpus", "forward_batch_generation"} <= set(
        methods
    )
    made = [
        node
        for node in ast.walk(methods["__init__"])
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "NgramCorpus"
    ]
    assert len(made) == 1
    assert {"draft_token_num", "max_bfs_breadth"} <= {word.arg for word in made[0].keywords}


def test_drafts_come_in_the_form_of_the_hosts_corpus(
    texts: list[tuple[list[int], list[int]]], corpus: adapter.Corpus
) -> None:
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus
    from sglang.srt.speculative.ngram_worker import _derive_tree_links

    own = NgramCorpus(draft_token_num=_NODES, max_trie_depth=_NODES, capacity=100_000)
    own.batch_put([prompt for prompt, _ in texts])
    own.synchronize()
    reqs = [_req(str(n), [*prompt, *output[:9]]) for n, (prompt, output) in enumerate(texts)]
    reqs.append(_req("twice", [1, 2, 3, 4, 5, 6, 1, 2, 3, 7, 8, 9, 1, 2, 3]))  # goes on both ways
    tails = [list(req.origin_input_ids[-_NODES:]) for req in reqs]
    lengths = [len(req.origin_input_ids) for req in reqs]
    corpus.begin(reqs)
    rids = [req.rid for req in reqs]
    ours, theirs = (each.batch_get(rids, tails, lengths) for each in (corpus, own))
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
    for tokens, flat in (ours, theirs):
        mask = flat.reshape(len(reqs), _NODES, _NODES)
        assert tokens.reshape(len(reqs), -1)[:, 0].tolist() == [tail[-1] for tail in tails]
        for tree in mask:
            parents = _parents(tree)
            assert set(np.unique(tree)) == {0, 1} and (np.diag(tree) == 1).all()
            assert not np.triu(tree, 1).any()
            for node, parent in enumerate(parents[1:], 1):
                above = tree[node].copy()
                above[node] = 0
                assert (above == tree[parent]).all()
        next_token, next_sibling = _derive_tree_links(flat, len(reqs), _NODES)
        assert (next_sibling >= 0).any()
        # Every node but the root is reached from its parent: first the child, then its siblings.
        reached = torch.cat([next_token, next_sibling], dim=1)
        for row in reached.tolist():
            assert sorted(node for node in row if node >= 0) == list(range(1, _NODES))
    assert corpus.faults == 0


def test_trees_go_along_with_the_text(corpus: adapter.Corpus) -> None:
    req = _req("a", [1, 2, 3, 4, 5, 6, 1, 2, 3, 7, 8, 9])
    req.output_ids.extend([1, 2, 3])
    [tokens], [mask] = _ask(corpus, [req])
    parents = _parents(mask)
    from_root = [tokens[node] for node, parent in enumerate(parents) if parent == 0]
    assert {4, 7} <= set(from_root)  # what followed 1 2 3, both times
    for node in range(1, _NODES):
        siblings = [tokens[n] for n in range(1, _NODES) if parents[n] == parents[node]]
        assert len(set(siblings)) == len(siblings)


def test_chains_where_the_host_takes_no_trees() -> None:
    corpus = adapter.Corpus(draft_token_num=_NODES, max_bfs_breadth=1)
    reqs = [_req("a", [1, 2, 3, 4, 5, 6, 1, 2, 3, 7, 8, 9, 1, 2, 3]), _req("b", [1, 2, 3])]
    _, masks = _ask(corpus, reqs)
    for mask in masks:
        assert _parents(mask) == list(range(-1, _NODES - 1))


@pytest.mark.parametrize("ours", [True, False])
def test_padding_keeps_the_sampled_distribution(ours: bool) -> None:
    """Where the host samples it accepts siblings in turn, by the sum of their probabilities: its
    own padding, several siblings of token 0, makes that token more likely than it is."""
    wanted = np.array([0.2, 0.5, 0.3])
    if ours:
        corpus = adapter.Corpus(draft_token_num=4)
        req = _req("a", [2])
        corpus.begin([req])
        tokens, mask = corpus.batch_get(["a"], [[2]], [1])
    else:
        from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

        own = NgramCorpus(draft_token_num=4, max_trie_depth=4, capacity=100)
        tokens, mask = own.batch_get(["a"], [[2]], [1])
    children = [n for n, p in enumerate(_parents(mask.reshape(4, 4))) if p == 0]
    first, accepted = np.zeros(3), 0.0
    for token in tokens[children]:
        taken = min(wanted[token], 1 - accepted)
        first[token] += taken
        accepted += taken
    rest = np.where(first > 0, 0, wanted)
    first += (1 - accepted) * rest / rest.sum()
    assert np.allclose(first, wanted) == ours


# --- A server: the worker, requests that come and go, and a target that follows a script ---


class _Target:
    """Says what the scripts say; anything else than their text gets another answer."""

    _OFF = 5
    OPTIONS: ClassVar[dict[str, Any]] = {}
    HINTS: ClassVar[bool] = False
    """Whether the token after the next one is the runner-up of each position of the script."""

    def __init__(self, name: str, model: str, overlap: bool) -> None:
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.runtime_context import publish

        arguments = _arguments(
            model,
            speculative_algorithm=name,
            speculative_num_draft_tokens=_NODES,
            speculative_ngram_capacity=100_000,
            disable_overlap_schedule=not overlap,
            **self.OPTIONS,
        )
        publish(arguments, role="scheduler")
        self.model_runner = types.SimpleNamespace(
            max_running_requests=8,
            model_config=ModelConfig.from_server_args(arguments),
            watermark_state=None,
        )
        self.scripts: dict[str, list[int]] = {}
        self.texts: dict[str, list[int]] = {}
        self.server_args = arguments
        self.slots = torch.arange(64 * 4096, dtype=torch.int32).view(64, 4096)
        self.forwards = 0

    def get_memory_pool(self) -> tuple[Any, Any]:
        cache = types.SimpleNamespace(move_kv_cache=lambda *_: None)
        return (
            types.SimpleNamespace(req_to_token=self.slots),
            types.SimpleNamespace(get_kvcache=lambda: cache),
        )

    def forward_batch_generation(self, batch: Any, **_: Any) -> Any:
        if not batch.forward_mode.is_target_verify():
            return types.SimpleNamespace(
                logits_output=None, next_token_ids=self.first(batch), can_run_cuda_graph=False
            )
        self.forwards += 1
        rows = len(batch.reqs)
        tokens = batch.input_ids.view(rows, _NODES).tolist()
        positions = batch.spec_info.positions.view(rows, _NODES).tolist()
        masks = batch.spec_info.custom_mask.view(rows, _NODES, _NODES).tolist()
        lines = []
        for row, req in enumerate(batch.reqs):
            start = int(batch.seq_lens[row])
            for node in range(_NODES):
                path = [n for n in range(_NODES) if masks[row][node][n]]
                places = [positions[row][n] for n in path]
                assert places == list(range(start, start + len(path)))
                text = self.texts[req.rid][:start] + [tokens[row][n] for n in path]
                lines.append(self.logits(req.rid, text))
        return types.SimpleNamespace(
            logits_output=types.SimpleNamespace(next_token_logits=torch.stack(lines)),
            can_run_cuda_graph=True,
        )

    def first(self, batch: Any) -> torch.Tensor:
        """The tokens behind the prompts of a batch."""
        return torch.tensor([self._next(req.rid, self.texts[req.rid]) for req in batch.reqs])

    def logits(self, rid: str, text: Sequence[int]) -> torch.Tensor:
        """What a request's text is followed by, (vocabulary,)."""
        said = self._next(rid, text)
        logits = torch.zeros(self.model_runner.model_config.vocab_size)
        if self.HINTS:
            logits[self._next(rid, [*text, said])] = 19.0
        logits[said] = 20.0
        return logits

    def _next(self, rid: str, text: Sequence[int]) -> int:
        script = self.scripts[rid]
        follows = len(text) < len(script) and script[: len(text)] == list(text)
        return script[len(text)] if follows else self._OFF


class _Batch(types.SimpleNamespace):
    """What a step of the host has; unlike its base it takes weak references."""


class _Server:
    """SGLang's scheduler as far as the worker can tell: who is in the batch, and where."""

    def __init__(
        self, algorithm: Any, model: str, *, overlap: bool, target: type[_Target] = _Target
    ) -> None:
        self.target = target(algorithm.name, model, overlap)
        worker_class = algorithm.create_worker(self.target.server_args)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.worker = worker_class(
                server_args=self.target.server_args,
                gpu_id=0,
                nccl_port=0,
                target_worker=self.target,
            )
            self.worker.enable_overlap = overlap
            self.worker.alloc_memory_pool()
        self.overlap = overlap
        self.running: list[Any] = []
        self.spec_info: Any = None
        self.truth = self.target.texts
        self.rows: dict[str, int] = {}
        self._late: list[tuple[Any, list[int]]] = []

    def add(self, reqs: list[Any], scripts: Iterable[list[int]]) -> None:
        """Prefills requests, which takes their first token."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        for req, script in zip(reqs, scripts, strict=True):
            self.target.scripts[req.rid] = [*req.origin_input_ids, *script]
            self.truth[req.rid] = list(req.origin_input_ids)
            self.rows[req.rid] = next(r for r in range(64) if r not in self.rows.values())
        result = self._forward(reqs, ForwardMode.EXTEND, None)
        self._take(reqs, result)
        self.running += reqs
        if self.spec_info is None:
            self.spec_info = result.next_draft_input
        else:
            self.spec_info.merge_batch(result.next_draft_input)
        self._process()

    def step(self, order: Sequence[int] | None = None) -> None:
        """A decoding step over the rows in `order`, by default all as they are."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        if order is not None:
            self.spec_info.filter_batch(torch.tensor(order, dtype=torch.int64))
            for req in set(self.running) - {self.running[n] for n in order}:
                del self.rows[req.rid]
            self.running = [self.running[n] for n in order]
        if not self.running:
            self.spec_info = None
            return
        result = self._forward(self.running, ForwardMode.DECODE, self.spec_info)
        late, self._late = self._late, []
        self._take(self.running, result)
        self.spec_info = result.next_draft_input
        if self.overlap:
            self._late, late = late, self._late
            self._process(keep=late)
        else:
            self._process()

    def _process(self, keep: list[tuple[Any, list[int]]] | None = None) -> None:
        if not self.overlap or keep is not None:
            for req, tokens in self._late:
                req.output_ids.extend(tokens)
            self._late = keep or []

    def _take(self, reqs: list[Any], result: Any) -> None:
        tokens = result.next_draft_input.accept_tokens.view(len(reqs), _NODES).tolist()
        for req, emitted, count in zip(reqs, tokens, result.accept_lens.tolist(), strict=True):
            self.truth[req.rid] = [*self.truth[req.rid], *emitted[:count]]
            self._late.append((req, emitted[:count]))

    def _forward(self, reqs: list[Any], mode: Any, spec_info: Any) -> Any:
        from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

        lengths = torch.tensor([len(self.truth[req.rid]) - 1 for req in reqs])
        batch = _Batch(
            reqs=reqs,
            forward_mode=mode,
            spec_info=spec_info,
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            req_pool_indices=torch.tensor([self.rows[req.rid] for req in reqs]),
            req_to_token_pool=self.target.get_memory_pool()[0],
            input_ids=None,
            out_cache_loc=None,
            has_grammar=False,
            grammar_needs_sync=lambda: False,
            return_logprob=False,
            device="cpu",
        )
        vocabulary = self.target.model_runner.model_config.vocab_size
        batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, vocabulary)
        return self.worker.forward_batch_generation(batch)

    def done(self, req: Any) -> bool:
        return len(self.truth[req.rid]) >= len(self.target.scripts[req.rid])


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends what a server has published. Nothing is drafted from logits unless the test says so:
    on a CPU, finding the likeliest of a whole vocabulary takes most of a step."""
    from sglang.srt.runtime_context import reset_context

    monkeypatch.setenv("FASTDRAFT_LOGITS", "0")
    yield
    reset_context()


def _serve(
    server: _Server,
    texts: list[tuple[list[int], list[int]]],
    sampling: Sequence[dict[str, Any]] = (),
    *,
    aborted: int | None = None,
    **params: str,
) -> list[list[int]]:
    """What a server says, at most four requests at a time, whose rows change places."""
    shuffled = random.Random(7)
    sampling = sampling or [{}] * len(texts)
    reqs = [
        _req(str(number), prompt, **params, **own)
        for number, ((prompt, _), own) in enumerate(zip(texts, sampling, strict=True))
    ]
    waiting = list(zip(reqs, texts, strict=True))
    for step in range(2000):
        if waiting and len(server.running) < 4:
            req, (_, output) = waiting.pop(0)
            server.add([req], [output])
        live = [
            row
            for row, req in enumerate(server.running)
            if not server.done(req) and not (step > 8 and req.rid == str(aborted))
        ]
        shuffled.shuffle(live)
        server.step(live)
        if not waiting and not server.running:
            break
    return [server.truth[req.rid][len(req.origin_input_ids) :] for req in reqs]


def _metric(name: str, *, engine: int, **labels: str) -> float:
    """One of fastdraft's, among those of the host."""
    from prometheus_client import REGISTRY

    found = REGISTRY.get_sample_value(f"fastdraft_{name}", {"engine": str(engine), **labels})
    assert found is not None, name
    return found


def _server_of_rank(rank: int, algorithm: Any, model: str, *, overlap: bool = False) -> _Server:
    """A server of a data parallel rank; 0 where the host has no ranks."""
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(tp_rank=0, dp_rank=rank or None):
        return _Server(algorithm, model, overlap=overlap)


@pytest.fixture(scope="module")
def forwards_of_ngram(model: str, texts: list[tuple[list[int], list[int]]]) -> int:
    """Of a server with the host's own n-gram speculation."""
    from sglang.srt.runtime_context import reset_context
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    server = _Server(SpeculativeAlgorithm.NGRAM, model, overlap=False)
    for tokens, (_, output) in zip(_serve(server, texts), texts, strict=True):
        assert tokens[: len(output)] == output
    reset_context()
    return server.target.forwards


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_server_says_what_it_would_have_said(
    overlap: bool,
    algorithm: Any,
    model: str,
    texts: list[tuple[list[int], list[int]]],
    forwards_of_ngram: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_Target, "OPTIONS", {"enable_metrics": True})
    server = _server_of_rank(int(overlap), algorithm, model, overlap=overlap)
    corpus = server.worker.ngram_corpus
    assert isinstance(corpus, adapter.Corpus)
    said = _serve(server, texts, aborted=2)
    for number, (tokens, (_, output)) in enumerate(zip(said, texts, strict=True)):
        if number == 2:
            assert tokens == output[: len(tokens)] and len(tokens) < len(output)
        else:
            assert tokens[: len(output)] == output
    assert corpus.faults == 0
    assert corpus.stats.mean_accepted_tokens > 3
    # The host erases at its next step with others; the last batch goes with the cache.
    assert corpus.num_requests <= 4
    server.worker.clear_cache_pool()
    assert corpus.num_requests == corpus.engine.num_requests == 0
    assert 2 * server.target.forwards < forwards_of_ngram

    # All that is told is among the host's own metrics.
    hits = [
        _metric("accepted_tokens_total", engine=int(overlap), namespace="unnamed", source=each)
        for each in SOURCES
    ]
    assert sum(hits) == corpus.stats.accepted > 20
    assert hits[SOURCES.index("context")] > 0
    assert _metric("steps_total", engine=int(overlap)) > 2
    assert (
        _metric("requests", engine=int(overlap))
        == _metric("faults_total", engine=int(overlap))
        == 0
    )


@pytest.fixture
def news() -> list[tuple[list[int], list[int]]]:
    """Prompts and outputs in which nothing comes twice, so that text alone tells of no token."""
    shuffled = random.Random(4)
    texts = []
    for _ in range(4):
        ids = shuffled.sample(range(100, 2000), 60)
        texts.append((ids[:20], ids[20:]))
    return texts


class _SampledTarget(_Target):
    """Gives a few tokens some probability, by the last two of a text; SGLang's sampler draws."""

    # The one for CPUs is not known to be deterministic.
    OPTIONS: ClassVar[dict[str, Any]] = {
        "enable_deterministic_inference": True,
        "attention_backend": "triton",
    }
    VOCABULARY = 512

    def __init__(self, *args: Any) -> None:
        from sglang.srt.layers.sampler import Sampler
        from sglang.srt.runtime_context import get_parallel

        super().__init__(*args)
        self.model_runner.model_config.vocab_size = self.VOCABULARY
        with get_parallel().override(tp_group=types.SimpleNamespace(device_group=None)):
            self.model_runner.sampler = Sampler()
        self.likely = torch.rand(self.VOCABULARY, 40, generator=torch.Generator().manual_seed(1))

    def first(self, batch: Any) -> torch.Tensor:
        return self.drawn([self.texts[req.rid] for req in batch.reqs], batch.sampling_info)

    def drawn(self, texts: list[list[int]], info: Any) -> torch.Tensor:
        """As SGLang draws the next tokens of texts without drafts."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        logits = torch.stack([self.logits("", text) for text in texts])
        positions = torch.tensor([len(text) - 1 for text in texts])
        output = LogitsProcessorOutput(next_token_logits=logits)
        return self.model_runner.sampler(output, info, False, [], [], positions)

    def logits(self, rid: str, text: Sequence[int]) -> torch.Tensor:
        logits = torch.full((self.VOCABULARY,), -30.0)
        logits[:40] = 8 * self.likely[(7 * text[-2] + text[-1]) % self.VOCABULARY]
        return logits


@pytest.fixture
def coupled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SGLang would compile its seeded draw, for which the hash has no form."""
    monkeypatch.setenv("FASTDRAFT_COUPLED_ACCEPTANCE", "1")
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.usefixtures("published", "coupled")
def test_coupled_acceptance_needs_seeds(
    algorithm: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_SampledTarget, "OPTIONS", {})
    with pytest.raises(InvalidValueError, match=r"without --enable-deterministic-inference"):
        _Server(algorithm, model, overlap=False, target=_SampledTarget)


def _alone(target: _SampledTarget, prompt: list[int], tokens: int, **sampling: Any) -> list[int]:
    """What SGLang samples without drafts, token for token, in a batch of one request."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    reqs = [_req("alone", prompt, **sampling)]
    batch = _Batch(reqs=reqs, device="cpu")
    info = SamplingBatchInfo.from_schedule_batch(batch, target.VOCABULARY)
    text = list(prompt)
    while len(text) < len(prompt) + tokens:
        text.append(int(target.drawn([text], info)))
    return text[len(prompt) :]


@pytest.mark.usefixtures("published", "coupled")
@pytest.mark.parametrize(("overlap", "filters"), [(True, {}), (False, {"top_p": 0.9, "top_k": 20})])
def test_a_seeds_sample_is_sglangs_own_with_any_drafts(
    overlap: bool, filters: dict[str, Any], algorithm: Any, model: str
) -> None:
    """Four rows at most, that change places; drafts from the rows, from earlier ones, and none."""
    size, rows = 48, 12
    shuffled = random.Random(3)
    prompts = [shuffled.choices(range(40), k=20) for _ in range(rows)]
    server = _Server(algorithm, model, overlap=overlap, target=_SampledTarget)
    options = [
        {"sampling_seed": row, "temperature": 0.4 + 0.07 * row, **filters} for row in range(rows)
    ]
    alone = [
        _alone(server.target, prompt, size, **option)
        for prompt, option in zip(prompts, options, strict=True)
    ]
    assert len({tuple(each) for each in alone}) == rows
    corpus = server.worker.ngram_corpus
    texts = [(prompt, [0] * size) for prompt in prompts]
    for more in ({"fastdraft": "off"}, {}, {}):
        before = corpus.stats.accepted
        for step in (1, -1):
            found = _serve(server, texts[::step], options[::step], **more)
            assert [each[:size] for each in found] == alone[::step]
        assert (corpus.stats.accepted - before > rows * size / 4) is not bool(more)
    assert corpus.faults == 0


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_server_says_the_same_with_and_without_logits(
    overlap: bool,
    algorithm: Any,
    model: str,
    texts: list[tuple[list[int], list[int]]],
    news: list[tuple[list[int], list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_Target, "HINTS", True)
    for texts_of, gain in ((news, 1.6), (texts[:3], 0.9)):
        forwards = []
        for value in ("0", "1"):
            monkeypatch.setenv("FASTDRAFT_LOGITS", value)
            server = _Server(algorithm, model, overlap=overlap)
            corpus = server.worker.ngram_corpus
            said = _serve(server, texts_of)
            for tokens, (_, output) in zip(said, texts_of, strict=True):
                assert tokens[: len(output)] == output
            forwards.append(server.target.forwards)
            server.worker.clear_cache_pool()
            assert corpus.faults == 0
            hits = corpus.totals(corpus.stats).get(hits_field("unnamed", "offer"), 0)
            assert (hits > 10) == (value == "1" and texts_of is news)
        assert forwards[1] * gain <= forwards[0]


@pytest.mark.usefixtures("published")
def test_a_server_drafts_from_what_another_one_said(
    algorithm: Any,
    model: str,
    texts: list[tuple[list[int], list[int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = (tmp_path / "fleet").as_uri()
    monkeypatch.setenv("FASTDRAFT_MEMORY_URL", url)
    monkeypatch.setenv("FASTDRAFT_MEMORY_KEY", "an operator's key")
    monkeypatch.setattr(_Target, "OPTIONS", {"enable_metrics": True})
    servers = [_server_of_rank(rank, algorithm, model) for rank in (5, 6)]
    writer, reader = servers
    # No prompt holds anything of its output.
    texts = [([7, 7, 7, *output[:6]], output[6:]) for _, output in texts]
    tenant, other = ({"fastdraft_namespace": name} for name in ("tenant", "other"))

    def serve(server: _Server, params: dict[str, str]) -> int:
        """How many steps the target takes for what the texts say."""
        begun = server.target.forwards
        said = _serve(server, texts, **params)
        assert all(
            tokens[: len(output)] == output for tokens, (_, output) in zip(said, texts, strict=True)
        )
        # The host says so of the last ones at its next step with others.
        server.worker.ngram_corpus.erase_match_state(map(str, range(len(texts))))
        return server.target.forwards - begun

    def refresh(server: _Server) -> None:
        assert server.worker.ngram_corpus.replica.refresh()

    def hits(rank: int, source: str) -> float:
        return _metric("accepted_tokens_total", engine=rank, namespace="named", source=source)

    alone = serve(writer, tenant)
    refresh(writer)
    # A namespace is fetched once a request of it has come.
    reader.worker.ngram_corpus.begin([_req("first", [1], **tenant), _req("other", [1], **other)])
    reader.worker.ngram_corpus.erase_match_state(["first", "other"])
    refresh(reader)
    assert hits(6, "read_only") == 0
    assert serve(reader, other) > 0.8 * alone
    assert hits(6, "read_only") == 0
    assert 4 * serve(reader, tenant) < alone
    assert hits(6, "read_only") > 0.5 * sum(len(output) for _, output in texts)
    assert hits(5, "read_only") == 0
    for rank, server in zip((5, 6), servers, strict=True):
        assert _metric("faults_total", engine=rank) == 0
        for kind in ("publish", "follow"):
            assert _metric("fleet_faults_total", engine=rank, kind=kind) == 0
        assert server.worker.ngram_corpus.faults == 0
        server.worker.ngram_corpus.replica.close()


# --- What the target's logits say ---


def _say(corpus: adapter.Corpus, requests: int, likely: dict[int, dict[int, float]]) -> None:
    """Passes logits on: at some nodes, numbered over all requests, tokens with their chances."""
    logits = torch.zeros(requests * _NODES, 1000)
    for node, chances in likely.items():
        logits[node] = -30
        for token, chance in chances.items():
            logits[node, token] = float(np.log(chance))
    corpus.verified(logits)


def _children(tokens: list[int], mask: Any, node: int = 0) -> list[int]:
    return [tokens[n] for n, parent in enumerate(_parents(mask)) if parent == node]


def test_logits_at_rejected_drafts_are_drafted_from(corpus: adapter.Corpus) -> None:
    texts = [[*range(1, 30), 1, 2], [*range(31, 60), 31, 32]]
    reqs = [_req(rid, text) for rid, text in zip("ab", texts, strict=True)]
    rows, masks = _ask(corpus, reqs)
    assert rows[0][:3] == [2, 3, 4] and rows[1][:3] == [32, 33, 34]
    # After 3 and 4, which are not accepted, 70 would have come.
    third = _parents(masks[0]).index(1)
    assert rows[0][third] == 4
    likely = {third: {70: 0.9, 72: 0.1}, _NODES: {81: 0.6, 82: 0.4}}
    _say(corpus, 2, likely)
    for req, emitted in zip(reqs, (90, 81), strict=True):
        req.output_ids.append(emitted)
    rows, masks = _ask(corpus, reqs)
    # The runner-up of the last position may come one token later.
    assert 82 in _children(rows[1], masks[1])
    assert 70 not in rows[0]
    for req in reqs:
        req.output_ids.extend([3, 4])
    rows, masks = _ask(corpus, reqs)
    assert {70, 72} <= set(_children(rows[0], masks[0]))
    # The second request is not drafted for from the first one's logits.
    assert not {70, 72} & set(rows[1])
    assert corpus.faults == 0
    corpus.erase_match_state(["a", "b"])


def test_padding_teaches_nothing(corpus: adapter.Corpus) -> None:
    req = _req("a", [8, 9])
    [tokens], _ = _ask(corpus, [req])
    assert tokens == [9] + [0] * (_NODES - 1)
    _say(corpus, 1, {node: {70: 1.0} for node in range(1, _NODES)})
    req.output_ids.extend([9, 0])
    assert 70 not in _ask(corpus, [req])[0][0]


def test_logits_are_of_the_requests_that_they_came_from(corpus: adapter.Corpus) -> None:
    reqs = [_req(rid, [1, 2, 3]) for rid in "abc"]
    _ask(corpus, reqs)
    _say(corpus, 3, {row * _NODES: {60 + row: 0.6, 70 + row: 0.4} for row in range(3)})
    # One ends, one is set aside and comes back, and the last one is now the first.
    corpus.erase_match_state(["a", "b"])
    for row, req in enumerate(reqs):
        req.output_ids.extend([60 + row])
    rows, masks = _ask(corpus, [reqs[2], reqs[1]])
    assert 72 in _children(rows[0], masks[0])
    assert max(rows[1]) < 70
    assert corpus.faults == 0


def test_ids_beyond_the_vocabulary_are_not_drafted() -> None:
    corpus = adapter.Corpus(draft_token_num=_NODES, vocabulary=100)
    req = _req("a", [1, 2, 900, 3])
    _ask(corpus, [req])
    _say(corpus, 1, {0: {4: 0.5, 50: 0.3, 900: 0.2}})
    req.output_ids.append(4)
    [tokens], _ = _ask(corpus, [req])
    assert 50 in tokens and 900 not in tokens
    assert corpus.faults == 0


def test_what_logits_said_is_freed_and_counted(
    corpus: adapter.Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    reqs = [_req(str(number), [1, 2, 3]) for number in range(4)]
    reqs[3].sampling_params.custom_params = {adapter.SWITCH: "off"}
    _ask(corpus, reqs)
    _say(corpus, 4, {})
    tables = [weakref.ref(corpus._texts[str(number)].successors) for number in range(3)]

    def held() -> tuple[int, float]:
        """Tables that are there, and bytes beside the indexes."""
        gc.collect()
        more = corpus.totals(corpus.stats)["request_bytes"] - corpus.engine.num_bytes
        return sum(table() is not None for table in tables), more

    assert held() == (3, 3 * 4096 * 72)
    corpus.erase_match_state(["0"])
    assert held() == (2, 2 * 4096 * 72)
    with monkeypatch.context() as patched:
        patched.setattr(corpus, "_emitted", lambda _: 1 / 0)
        _ask(corpus, reqs[1:2])  # goes on without drafts
    assert held() == (1, 4096 * 72)
    corpus.reset()
    assert held() == (0, 0)


@pytest.mark.parametrize("why", ["chains", "ranks", "switch"])
def test_where_nothing_is_drafted_from_logits(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {
        "chains": {"max_bfs_breadth": 1},
        "ranks": {"server_args": types.SimpleNamespace(tp_size=2)},
        "switch": {},
    }[why]
    if why == "switch":
        monkeypatch.setenv("FASTDRAFT_LOGITS", "0")
    corpus = adapter.Corpus(draft_token_num=_NODES, **options)
    req = _req("a", [1, 2, 3])
    _ask(corpus, [req])
    corpus.verified(None)  # not looked at
    req.output_ids.extend([4])
    assert _ask(corpus, [req])[0] == [[4] + [0] * (_NODES - 1)]
    assert corpus.totals(corpus.stats)["request_bytes"] == corpus.engine.num_bytes
    assert corpus.faults == 0


@pytest.mark.parametrize("logits", [torch.zeros(_NODES + 1, 9), torch.zeros(_NODES, 9), None])
def test_logits_of_another_form_are_a_fault_once(corpus: adapter.Corpus, logits: Any) -> None:
    reqs = [_req(rid, [1, 2, 3, 4, 1, 2]) for rid in "ab"]
    _ask(corpus, reqs)
    corpus.verified(logits)
    corpus.verified(logits)
    for req in reqs:
        req.output_ids.append(3)
    rows, _ = _ask(corpus, reqs)
    corpus.verified(logits)
    assert [row[:3] for row in rows] == [[3, 4, 1]] * 2
    assert corpus.faults == 1
    assert corpus.totals(corpus.stats)["request_bytes"] == corpus.engine.num_bytes


# --- Requests ---


def test_a_request_comes_back_after_it_was_set_aside(corpus: adapter.Corpus) -> None:
    req = _req("a", [1, 2, 3, 4, 5, 6, 7, 8])
    req.output_ids.extend([1, 2])
    _ask(corpus, [req])
    corpus.erase_match_state(["a"])
    req.output_ids.extend([3, 4])
    [tokens], _ = _ask(corpus, [req])
    assert tokens[:4] == [4, 5, 6, 7]
    assert corpus.faults == 0


def test_an_id_that_comes_again_is_another_request(corpus: adapter.Corpus) -> None:
    _ask(corpus, [_req("a", [1, 2, 3, 4, 1, 2])])
    [tokens], _ = _ask(corpus, [_req("a", [7, 8, 9, 6, 7, 8])])
    assert tokens[:3] == [8, 9, 6]
    assert corpus.engine.num_requests == 1
    assert corpus.faults == 0


def test_what_was_said_last_is_remembered(corpus: adapter.Corpus) -> None:
    first = _req("a", [1, 2, 3])
    _ask(corpus, [first])
    # Emitted in the request's last step, after which the corpus was not asked for it again.
    first.output_ids.extend([41, 42, 43, 44, 45])
    corpus.erase_match_state(["a", "unknown"])
    [tokens], _ = _ask(corpus, [_req("b", [9, 41, 42])])
    assert tokens[:4] == [42, 43, 44, 45]


def _drafts_from(corpus: adapter.Corpus, text: list[int], **params: Any) -> bool:
    """Whether a new request, which begins as `text`, is drafted from what others said."""
    [tokens], _ = _ask(corpus, [_req("x", [9, *text[:4]], **params)])
    corpus.erase_match_state(["x"])
    return tokens[1] == text[4]


def _remember(corpus: adapter.Corpus, text: list[int], **params: Any) -> None:
    _ask(corpus, [_req("x", text, **params)])
    corpus.erase_match_state(["x"])


def test_requests_are_kept_apart(corpus: adapter.Corpus) -> None:
    text = list(range(40, 60))
    lora, tenant = {"lora_id": "pirate"}, {"extra_key": "tenant"}
    for owner in ({"cache_salt": "tenant"}, tenant, lora, {**lora, **tenant}, {}):
        assert not _drafts_from(corpus, text, **owner)
        _remember(corpus, text, **owner)
        # Requests of one salt, key or adapter share their text.
        assert _drafts_from(corpus, text, **owner)
    assert not _drafts_from(corpus, text, **{adapter.REMEMBER: False})
    _remember(corpus, text[::-1], **{adapter.REMEMBER: False})
    assert not _drafts_from(corpus, text[::-1])
    assert corpus.faults == 0


def test_a_request_may_say_how_much_to_draft(corpus: adapter.Corpus) -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 3
    asked = [{}, {adapter.SWITCH: "off"}, {adapter.LOOKAHEAD: 3}, {adapter.LOOKAHEAD: 0}]
    reqs = [_req(str(n), text, **params) for n, params in enumerate(asked)]
    drafts, masks = _ask(corpus, reqs)
    depths = [int(mask.sum(axis=1).max()) - 1 for mask in masks]
    drafted = [sum(token > 0 for token in tokens[1:]) for tokens in drafts]
    assert drafted[0] > 3
    assert drafted[1:] == [0, 3, 0]
    assert depths[2] >= 3
    # What is no length is warned of.
    assert (corpus.refused, corpus.faults) == (1, 0)
    # Where nobody is drafted for, that is no fault.
    _ask(corpus, reqs[1:2])
    assert (corpus.refused, corpus.faults) == (1, 0)


def test_requests_without_room_for_a_draft_are_not_indexed(corpus: adapter.Corpus) -> None:
    text = [1, 2, 3, 4, 5] * 3
    reqs = [_req(str(most), text, max_new_tokens=most) for most in (2, 3)]
    for req in reqs:
        req.output_ids.append(1)
    (short, long), _ = _ask(corpus, reqs)
    assert short[1:] == [0] * (_NODES - 1)
    assert long[1:4] == [2, 3, 4]
    assert corpus.engine.num_requests == 1
    assert corpus.faults == 0


def test_predictions_and_frozen_datastores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Datastore(max_bytes=1 << 20)
    store.add(list(range(200, 240)))
    store.save(tmp_path / "frozen.fds")
    monkeypatch.setenv("FASTDRAFT_DATASTORES", str(tmp_path / "frozen.fds"))
    corpus = adapter.Corpus(draft_token_num=_NODES)
    reqs = [
        _req("a", [1, 205, 206], cache_salt="tenant"),
        _req("b", [1, 2, 3], **{adapter.PREDICTION: list(range(70, 90))}),
    ]
    from_store, predicted = _ask(corpus, reqs)[0]
    assert from_store[:4] == [206, 207, 208, 209]
    assert predicted[:4] == [3, 70, 71, 72]


def test_an_empty_cache_of_the_host_leaves_what_was_said(corpus: adapter.Corpus) -> None:
    """SGLang empties its cache when weights change; text stays true. Forgetting is a call."""
    _ask(corpus, [_req("a", list(range(40, 60)))])
    corpus.erase_match_state(["a"])
    _ask(corpus, [_req("b", [1])])
    corpus.reset()
    assert corpus.num_requests == corpus.engine.num_requests == 0
    [tokens], _ = _ask(corpus, [_req("c", [40, 41, 42])])
    assert tokens[:4] == [42, 43, 44, 45]
    corpus.reset()
    corpus.forget()
    [tokens], _ = _ask(corpus, [_req("d", [40, 41, 42])])
    assert tokens == [42] + [0] * (_NODES - 1)
    assert corpus.faults == 0


def test_long_prompts_are_indexed_beside_the_steps(corpus: adapter.Corpus) -> None:
    gate = threading.Event()
    assert corpus._thread is not None
    prompt = random.Random(0).choices(range(1000), k=20_000)
    corpus._thread.submit(gate.wait)
    reqs = [_req("long", prompt), _req("other", [1, 2, 3, 1, 2, 3])]
    for token in prompt[500:540]:
        [none, drafted], _ = _ask(corpus, reqs)
        assert none[1:] == [0] * (_NODES - 1)
        assert drafted[1:4] == [1, 2, 3]
        reqs[0].output_ids.append(token)
    gate.set()
    corpus.drain()
    # More was emitted meanwhile than the host shows of a text.
    [found, _], _ = _ask(corpus, reqs)
    assert found[1:4] == prompt[540:543]
    corpus.erase_match_state(["long", "other"])
    corpus.drain()
    assert corpus.stats.emitted == 40
    assert corpus.faults == corpus.refused == corpus.engine.num_requests == 0


def test_ranks_draft_the_same(texts: list[tuple[list[int], list[int]]]) -> None:
    ranks = [adapter.Corpus(draft_token_num=_NODES) for _ in range(2)]
    requests = [
        [_req(str(n), prompt) for n, (prompt, _) in enumerate(texts)] for _ in range(len(ranks))
    ]
    for step in range(40):
        answers = [_ask(rank, reqs) for rank, reqs in zip(ranks, requests, strict=True)]
        assert answers[0][0] == answers[1][0]
        assert (answers[0][1] == answers[1][1]).all()
        for reqs in requests:
            for req, (_, output) in zip(reqs, texts, strict=True):
                req.output_ids.extend(output[3 * step : 3 * step + 3])
        for rank in ranks:
            rank.erase_match_state([str(step)])


# --- Faults ---


def test_a_fault_stays_with_the_request_that_it_was_met_with(
    caplog: pytest.LogCaptureFixture,
) -> None:
    corpus = adapter.Corpus(draft_token_num=_NODES, vocabulary=100)
    reqs = [
        _req("sound", [1, 2, 3, 4, 5, 1, 2]),
        _req("broken", [1, 2, 3, 4, 5, 1, 2], **{adapter.PREDICTION: ["x"]}),
        _req("beyond", [1, 2, 3, 4, 5, 1, 2], **{adapter.PREDICTION: [100]}),
        _req("torn", [1, 2, 3, 4, 5, 1, 2]),
        _req("negative", [1, 2, 3, 4, 5, 1, 2]),
        _req("foreign", [1, 2, 900, 4, 5, 1, 2]),
    ]
    with caplog.at_level(logging.WARNING):
        corpus.begin(reqs)
        tails = [[1, 2], [1, 2], [1, 2], [1, 2], [-1], [1, 2]]
        tokens, mask = corpus.batch_get([r.rid for r in reqs], tails, [7, 7, 7, 70, 8, 7])
    rows = tokens.reshape(len(reqs), _NODES).tolist()
    assert rows[0][:4] == [2, 3, 4, 5]
    for row, tail in zip(rows[1:5], tails[1:5], strict=True):
        assert row == [tail[-1]] + [0] * (_NODES - 1)
    for tree in mask.reshape(len(reqs), _NODES, _NODES)[1:5]:
        assert _parents(tree) == list(range(-1, _NODES - 1))
    # An id in a prompt that is no token's, as an image's, is drafted around.
    assert max(rows[5]) < 100
    # What is wrong with a request itself is not counted among the faults, and hides none.
    assert (corpus.refused, corpus.faults) == (2, 2)
    said = [r.getMessage() for r in caplog.records if r.name.startswith("fastdraft")]
    assert {message.partition(" (")[0] for message in said} == {
        "fastdraft: a request goes on without drafts, since its options are wrong",
        "fastdraft: drafting failed; the requests concerned go on without drafts",
    }
    assert corpus.engine.num_requests == 2
    reqs[0].output_ids.append(3)
    assert _ask(corpus, reqs[:1])[0][0][:3] == [3, 4, 5]
    corpus.erase_match_state([req.rid for req in reqs])
    assert corpus.num_requests == corpus.engine.num_requests == 0


def test_the_end_of_a_request_is_kept_from_faults(corpus: adapter.Corpus) -> None:
    req = _req("a", [1, 2, 3])
    _ask(corpus, [req])
    req.output_ids.append(-1)
    corpus.erase_match_state(["a"])
    assert corpus.faults == 1
    assert corpus.num_requests == corpus.engine.num_requests == 0


def test_a_host_that_has_changed_goes_on_without_drafts(corpus: adapter.Corpus) -> None:
    req = types.SimpleNamespace(rid="a", origin_input_ids=[1, 2, 1], output_ids=[])
    [tokens], _ = _ask(corpus, [req])
    assert tokens == [1] + [0] * (_NODES - 1)
    assert corpus.faults == 1


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        *(("MEMORY_BYTES", value, f".*'{value}'") for value in ("1G", "-1", "1.5")),
        ("LOGITS", "off", "must be 0 or 1, got 'off'"),
    ],
)
def test_bad_settings_say_so(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidValueError, match="at least 2, got 1"):
        adapter.Corpus(draft_token_num=1)
    monkeypatch.setenv(f"FASTDRAFT_{variable}", value)
    with pytest.raises(InvalidValueError, match=f"FASTDRAFT_{variable} {message}"):
        adapter.Corpus(draft_token_num=_NODES)


# --- Over HTTP ---


def test_predictions_and_tools_reach_the_sampling_parameters(
    package: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The front with SGLang's own request types and OpenAI's client; its server needs a GPU."""
    import fastapi
    import openai
    from sglang.srt.entrypoints.openai import protocol
    from sglang.srt.observability import http_request_metrics
    from transformers import AutoTokenizer

    from http_serving import running

    tokenizer = AutoTokenizer.from_pretrained(model)
    found: list[dict[str, Any]] = []
    app = fastapi.FastAPI()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    # The method is chosen before the server's module is imported, which calls this with its app.
    mount()
    mount()
    http_request_metrics.add_http_request_metrics_middleware(app)
    assert [each.cls for each in app.user_middleware].count(Front) == 1

    @app.post("/tokenize")
    def tokenize(body: dict[str, Any]) -> Any:
        request = protocol.TokenizeRequest.model_validate(body)
        assert request.add_special_tokens is False
        if request.messages is None:
            ids = tokenizer.encode(request.prompt, add_special_tokens=False)
        else:
            text = tokenizer.apply_chat_template(
                [message.model_dump() for message in request.messages],
                add_generation_prompt=request.add_generation_prompt,
                tokenize=False,
            )
            ids = tokenizer.encode(text, add_special_tokens=False)
        return protocol.TokenizeResponse(tokens=ids, count=len(ids), max_model_len=512)

    @app.post("/detokenize")
    def detokenize(body: dict[str, Any]) -> Any:
        request = protocol.DetokenizeRequest.model_validate(body)
        return protocol.DetokenizeResponse(text=tokenizer.decode(request.tokens))

    @app.post("/v1/chat/completions")
    def chat(body: dict[str, Any]) -> dict[str, Any]:
        request = protocol.ChatCompletionRequest.model_validate(body)
        return answer(request.to_sampling_params([], {})["custom_params"])

    @app.post("/v1/completions")
    def complete(body: dict[str, Any]) -> dict[str, Any]:
        return answer(protocol.CompletionRequest.model_validate(body).custom_params)

    def answer(params: dict[str, Any]) -> dict[str, Any]:
        """As a server does whose engine's corpus gets the request."""
        found.append(params)
        req = _req(f"r{len(found)}", [5, 6, 7], **params)
        corpus.begin([req])
        _ask(corpus, [req])
        req.output_ids.append(params["prediction_token_ids"][0])
        _ask(corpus, [req])
        corpus.erase_match_state([req.rid])
        usage = protocol.UsageInfo(prompt_tokens=3, completion_tokens=2, total_tokens=5)
        return {"choices": [], "usage": usage.model_dump()}

    function = {"name": "get_weather", "parameters": {"type": "object"}}
    options = {
        "prediction": {"type": "content", "content": "one two three"},
        "tools": [{"type": "function", "function": function}],
        "custom_params": {"fastdraft_lookahead": 3},
    }
    corpus = adapter.Corpus(draft_token_num=_NODES, ledger=Ledger(tmp_path))
    with running(app) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=60)
        messages = [{"role": "user", "content": "?"}]
        answers = [
            client.chat.completions.create(model="demo", messages=messages, extra_body=options),
            client.completions.create(model="demo", prompt="?", extra_body=options),
        ]
    for each in answers:
        details = each.usage.completion_tokens_details
        assert details.accepted_prediction_tokens == 1
    routes = (package / "srt/entrypoints/http_server.py").read_text()
    assert all(f'"{path}"' in routes for path in ("/tokenize", "/detokenize"))
    assert "add_http_request_metrics_middleware(app)" in routes
    # Keys are checked outside of it, since what is added later is asked earlier.
    assert "add_api_key_middleware(" in routes.partition("add_http_request_metrics_middleware(")[2]
    for params in found:
        assert params["fastdraft_lookahead"] == 3
        assert tokenizer.decode(params["prediction_token_ids"]) == "one two three"
        assert "get_weather" in tokenizer.decode(params["fastdraft_template_ids"])
    assert len(found) == 2


def test_doctor_finds_this_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.check() == 0
    found = line_of("SGLang", capsys.readouterr().out)
    assert found == f"{version('sglang')} (sglang), loads fastdraft"


# In the place of the packages, whose beginnings import much that this version has elsewhere.
_OLDER = """
import sys, types
for name in ("sglang", "sglang.srt", "sglang.srt.speculative"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [sys.argv[1] + "/" + name.replace(".", "/")]
from fastdraft.serving.sglang import register
register()
register()
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
SpeculativeAlgorithm.from_string("FASTDRAFT").validate_server_args(None)
"""


def test_an_older_version_is_refused_when_its_arguments_are_checked() -> None:
    older = os.environ["FASTDRAFT_SGLANG_OLDER"]
    path = os.pathsep.join([older, os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-c", _OLDER, older],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert "FASTDRAFT needs SGLang 0.5.23 or newer, got 0.5.12" in run.stderr
    arguments = ast.parse(Path(older, "sglang/srt/server_args.py").read_text(encoding="utf-8"))
    assert "algo.validate_server_args(self)" in ast.unparse(arguments)
