"""TRL's own trainers, with drafts and without: on one rank, on two, and resumed."""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import runpy
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from fastdraft import Datastore, Engine, hf, step_latency
from fastdraft.errors import DatastoreError, InvalidValueError
from fastdraft.hf.step import CachedModel
from fastdraft.hf.trl import MEMORY_FILE, attach
from step_clock import StepClock

PROMPTS = ["the first of many", "a house by the water", "when it began to rain", "many years ago"]
GROUP, NEW, EPOCHS = 4, 20, 2
CHECKPOINT = 6
EXAMPLE = Path(__file__).parents[2] / "examples" / "python" / "same_training.py"
FORK = multiprocessing.get_context("fork")


def _trainer(
    folder: Path, out: Path, sampled: list[list[int]], dtype: str = "float32", **options: Any
) -> GRPOTrainer:
    """A trainer whose batch on each rank is a group, so that an epoch has a step for each prompt,
    or half of that on two ranks."""

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        sampled.extend(completion_ids)
        return [len(set(each)) / len(each) for each in completion_ids]

    usual = {
        "use_cpu": True,
        "per_device_train_batch_size": GROUP,
        "num_generations": GROUP,
        "max_completion_length": NEW,
        "temperature": 0.2,
        "num_train_epochs": EPOCHS,
        "learning_rate": 1e-6,
        "bf16": False,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    config = GRPOConfig(output_dir=str(out), **usual | options)
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=dtype),
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": each} for each in PROMPTS]),
    )


def _on_a_step_clock() -> None:
    """Drafts as on any machine, in this process."""
    clock = StepClock()
    step_latency.clock = clock
    CachedModel.forward = clock.timing_forwards(CachedModel.forward)


def _as_rank(rank: int, ranks: int, port: int) -> None:
    """Makes this process one of several."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}


def _zero(stage: int) -> dict[str, Any]:
    """Options of a trainer with DeepSpeed."""
    # On a CPU DeepSpeed would first compile shared-memory communication for its ranks. That takes
    # minutes on a busy machine, and never ends if an earlier compilation was killed.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Each rank would import it, and with it PyTorch's compiler.
    importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    sizes = ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"]
    return {"deepspeed": {"zero_optimization": {"stage": stage}, **dict.fromkeys(sizes, "auto")}}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def _train(
    folder: Path,
    out: Path,
    rank: int,
    ranks: int,
    port: int,
    attached: dict[str, bool],
    resumed: Path | None,
    options: dict[str, Any],
) -> None:
    """Trains in a process of its own, and writes what came of it."""
    if ranks > 1:
        _as_rank(rank, ranks, port)
    _on_a_step_clock()
    sampled: list[list[int]] = []
    trainer = _trainer(folder, out / str(rank), sampled, **options)
    store = attach(trainer, **attached)
    trainer.train(resume_from_checkpoint=resumed and str(resumed))
    model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
    engine = model.generate.keywords["custom_generate"].drafter
    digest = hashlib.sha256()
    for weight in model.parameters():
        digest.update(weight.detach().contiguous().view(torch.uint8).numpy())
    result = {
        "log": [each for each in trainer.state.log_history if "loss" in each],
        "weights": digest.hexdigest(),
        "sampled": sum(map(len, sampled)),
        "prompts": len(sampled) * max(len(tokenizer(each).input_ids) for each in PROMPTS),
        "remembered": len(store),
        "running": engine.num_requests,
        "difference": _difference(model, tokenizer, engine),
    }
    (out / f"{rank}.json").write_text(json.dumps(result))


def _difference(model: Any, tokenizer: Any, engine: Engine) -> float:
    """By how much log-probabilities that are sampled with are off those of a forward."""
    del model.generate
    inputs = tokenizer(PROMPTS[:1] * GROUP, return_tensors="pt")
    output = hf.generate(
        model.eval(), **inputs, drafter=engine, do_sample=True, max_new_tokens=NEW, logprobs=True
    )
    columns = inputs["input_ids"].shape[1]
    with torch.no_grad():
        logits = model(output.sequences).logits[:, columns - 1 : -1]
    expected = logits.log_softmax(-1).gather(2, output.sequences[:, columns:, None])[..., 0]
    return max(
        float((own - line[: len(own)]).abs().max())
        for own, line in zip(output.raw_logprobs, expected, strict=True)
    )


Trained = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def trained(words: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A function that trains on `ranks` processes and returns the result of each."""
    # Else each process's collector walks all that was imported.
    gc.collect()
    gc.freeze()

    def run(
        ranks: int,
        *,
        resumed: Path | None = None,
        drafts: bool = True,
        bitwise: bool = False,
        **options: Any,
    ) -> list[dict[str, Any]]:
        out = tmp_path_factory.mktemp("trained")
        port = _free_port()
        attached = {"drafts": drafts, "bitwise": bitwise}
        processes = [
            FORK.Process(
                target=_train, args=(words, out, rank, ranks, port, attached, resumed, options)
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        results = [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]
        return [{**result, "out": out / str(rank)} for rank, result in enumerate(results)]

    return run


def _logged(result: dict[str, Any], name: str) -> list[float]:
    """A number of each step."""
    return [each[f"fastdraft/{name}"] for each in result["log"]]


@pytest.fixture(scope="module")
def checkpointed(trained: Trained) -> dict[str, Any]:
    """A run on one rank with a checkpoint in the middle of its second epoch.

    TRL's sampler shuffles a resumed epoch as it would the first one.
    """
    [result] = trained(1, save_strategy="steps", save_steps=CHECKPOINT, shuffle_dataset=False)
    return result


def test_rollouts_are_drafted_from_earlier_epochs(checkpointed: dict[str, Any]) -> None:
    result = checkpointed
    assert len(result["log"]) == EPOCHS * len(PROMPTS)
    assert min(_logged(result, "tokens_per_step")) > 1
    drafted = _logged(result, "datastore_per_step")
    assert drafted[0] == 0
    assert min(drafted[len(PROMPTS) :]) > 0
    assert result["running"] == 0
    assert result["difference"] < 1e-4


def test_a_run_without_drafts_is_the_same(trained: Trained, checkpointed: dict[str, Any]) -> None:
    [plain] = trained(1, drafts=False, shuffle_dataset=False)
    assert set(_logged(plain, "tokens_per_step")) == {1}
    assert max(_logged(plain, "forwards")) == NEW
    assert sum(_logged(checkpointed, "forwards")) < 0.9 * sum(_logged(plain, "forwards"))
    assert _logged(plain, "tokens_hash") == _logged(checkpointed, "tokens_hash")
    assert plain["weights"] == checkpointed["weights"]
    assert [each["reward"] for each in plain["log"]] == [
        each["reward"] for each in checkpointed["log"]
    ]


def test_in_bfloat16_a_bitwise_run_without_drafts_is_the_same(trained: Trained) -> None:
    # At a rate at which weights change in bfloat16.
    options = {"dtype": "bfloat16", "learning_rate": 1e-3}
    arms = [trained(1, drafts=drafts, bitwise=True, **options)[0] for drafts in (True, False)]
    drafted, plain = arms
    assert _logged(drafted, "tokens_hash") == _logged(plain, "tokens_hash")
    assert drafted["weights"] == plain["weights"]
    assert sum(_logged(drafted, "forwards")) < sum(_logged(plain, "forwards"))


def test_a_resumed_run_is_the_same_and_remembers(
    trained: Trained, checkpointed: dict[str, Any]
) -> None:
    folder = checkpointed["out"] / f"checkpoint-{CHECKPOINT}"
    options = {"save_strategy": "steps", "save_steps": CHECKPOINT, "shuffle_dataset": False}
    [result] = trained(1, resumed=folder, **options)
    assert _logged(result, "tokens_hash") == _logged(checkpointed, "tokens_hash")
    assert result["weights"] == checkpointed["weights"]
    # The log begins with that of the checkpoint.
    assert _logged(result, "datastore_per_step")[CHECKPOINT] > 0
    assert result["remembered"] == checkpointed["remembered"]

    (folder / MEMORY_FILE).unlink()
    [forgetful] = trained(1, resumed=folder, **options)
    assert _logged(forgetful, "datastore_per_step")[CHECKPOINT] == 0
    assert forgetful["weights"] == checkpointed["weights"]


def test_ranks_share_what_they_sample(trained: Trained) -> None:
    results = trained(2)
    for result in results:
        # More than all that the rank can have remembered of its own.
        assert result["remembered"] > result["sampled"] + result["prompts"]
        assert result["difference"] < 1e-4
    log = results[0]["log"]
    assert len(log) == EPOCHS * len(PROMPTS) // 2
    assert min(_logged(results[0], "datastore_per_step")[2:]) > 0
    assert results[0]["weights"] == results[1]["weights"]


def test_samples_depend_neither_on_ranks_nor_on_how_a_step_is_cut(trained: Trained) -> None:
    # Weights that differ by the order of sums would be other logits.
    options = {"learning_rate": 0.0}
    cuts = [
        trained(1, per_device_train_batch_size=2 * GROUP, **options)[0],
        trained(1, gradient_accumulation_steps=2, **options)[0],
        trained(2, **options)[0],
    ]
    expected, *others = [_logged(each, "tokens_hash") for each in cuts]
    assert len(set(expected)) == EPOCHS * len(PROMPTS) // 2
    assert others == [expected, expected]


def test_with_zero_2_a_run_without_drafts_is_the_same(trained: Trained) -> None:
    drafted, plain = (trained(2, drafts=drafts, **_zero(2)) for drafts in (True, False))
    assert _logged(drafted[0], "tokens_hash") == _logged(plain[0], "tokens_hash")
    assert len({each["weights"] for each in drafted + plain}) == 1
    assert sum(_logged(drafted[0], "forwards")) < sum(_logged(plain[0], "forwards"))


def test_zero_3_is_refused(words: Path, tmp_path: Path) -> None:
    def run() -> None:
        _as_rank(0, 1, _free_port())
        trainer = _trainer(words, tmp_path, [], **_zero(3))
        with pytest.raises(InvalidValueError, match=r"must be whole on each rank, got FSDP"):
            attach(trainer)

    process = FORK.Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_the_example_ends_in_equal_weights(words: Path, tmp_path: Path) -> None:
    def run() -> None:
        sys.argv = [EXAMPLE.name, str(words)]
        with (tmp_path / "printed").open("w") as sys.stdout:
            warnings.simplefilter("default")
            _on_a_step_clock()
            runpy.run_path(str(EXAMPLE))

    process = FORK.Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == 0
    printed = (tmp_path / "printed").read_text()
    lines = re.findall(r"^ +(\d)  (yes|no) +(\d+)  (\S+) +(\d+) ", printed, re.MULTILINE)
    assert [each[:2] for each in lines] == [(e, d) for e in "123" for d in ("yes", "no")]
    assert lines[::2] != lines[1::2]
    for drafted, plain in zip(lines[::2], lines[1::2], strict=True):
        assert drafted[2:4] == plain[2:4]
    assert int(lines[4][4]) < int(lines[5][4])
    one, other = re.findall("^weights with.* ([0-9a-f]{64})$", printed, re.MULTILINE)
    assert one == other


def test_a_memory_is_passed_on(words: Path, tmp_path: Path) -> None:
    text = list(range(40))
    live = Datastore()
    live.add(text, prompt_size=4)
    assert attach(_trainer(words, tmp_path, []), memory=live) is live
    live.save(tmp_path / "memory")
    for memory in (tmp_path / "memory", Datastore.open(tmp_path / "memory")):
        store = attach(_trainer(words, tmp_path, []), memory=memory)
        assert not store.frozen
        assert store.find(text[:6]) == live.find(text[:6]) != []
    with pytest.raises(DatastoreError):
        attach(_trainer(words, tmp_path, []), memory=tmp_path / "none")


def test_what_is_not_drafted_for_is_refused(words: Path, tmp_path: Path) -> None:
    trainer = _trainer(words, tmp_path, [])
    model = trainer.model
    for changes, message in [
        ({"use_vllm": True}, "use_vllm must be off"),
        ({"rollout_func": print}, "rollout_func must be None"),
        # The trainer's own flag: on a CPU accelerate leaves FSDP out.
        ({"is_fsdp_enabled": True}, "parameters must be whole on each rank"),
    ]:
        before = {name: getattr(trainer, name) for name in changes}
        vars(trainer).update(changes)
        with pytest.raises(InvalidValueError, match=message):
            attach(trainer)
        vars(trainer).update(before)
        assert "generate" not in vars(model)
    # The older option turns the newer one on: the one that was set is named.
    for option in ("use_transformers_continuous_batching", "use_transformers_paged"):
        batching = _trainer(words, tmp_path, [], **{option: True})
        with pytest.raises(InvalidValueError, match=f"^{option} must be off"):
            attach(batching)
    with pytest.raises(InvalidValueError, match="must be a GRPOTrainer or an RLOOTrainer"):
        attach(SimpleNamespace(model=model))
    attach(trainer)
    with pytest.raises(InvalidValueError, match="attach once"):
        attach(trainer)


def test_a_custom_generate_in_generation_kwargs_is_refused(words: Path, tmp_path: Path) -> None:
    trainer = _trainer(words, tmp_path, [], generation_kwargs={"custom_generate": hf.speculate()})
    with pytest.raises(InvalidValueError, match="custom_generate must be an argument"):
        trainer.train()
