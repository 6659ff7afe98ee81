"""The completions that TRL logs are read as those that its trainer sampled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from fastdraft.replay.calls import Reader
from fastdraft.replay.lines import family_files, parse_lines
from fastdraft.replay.tokenizer import TextTokenizer


def test_logged_completions_are_those_that_were_sampled(words: Path, tmp_path: Path) -> None:
    sampled: list[tuple[str, str]] = []

    def reward(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
        sampled.extend(zip(prompts, completions, strict=True))
        return [float(len(each)) for each in completions]

    config = GRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        num_train_epochs=1,
        bf16=False,
        logging_steps=1,
        log_completions=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(words),
        processing_class=AutoTokenizer.from_pretrained(words),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": f"the house {n}"} for n in range(3)]),
    ).train()
    reader = Reader(TextTokenizer("none"))
    files = family_files([tmp_path / "completions"], of_any_form=True).values()
    found = [record for file in files for line in parse_lines(file) for record in reader(line)]
    assert len(sampled) == 12 and not reader.left_out
    assert sorted((each["prompt"], each["output"]) for each in found) == sorted(sampled)
