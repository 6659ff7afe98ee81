"""A model is trained twice, with drafts and without: the same tokens, the same weights.

Needs fastdraft[demo] and trl>=1.16: python same_training.py [MODEL]

MODEL is by default the demo model of 135M parameters.
"""

from __future__ import annotations

import hashlib
import sys
from tempfile import TemporaryDirectory

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from fastdraft.demo import ensure_model
from fastdraft.hf.trl import attach

folder = sys.argv[1] if len(sys.argv) > 1 else ensure_model()
asked = [f"What is {each}? Think step by step." for each in ("3 + 4", "12 + 30", "7 + 8", "51 + 9")]
prompts = [{"prompt": [{"role": "user", "content": each}]} for each in asked]


def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
    return [len(set(each)) / len(each) for each in completion_ids]


def train(out: str, *, drafts: bool) -> tuple[list[dict[str, float]], str]:
    """The log of each step, and a hash of all weights after the last one."""
    options = {"bf16": False, "logging_steps": 1, "report_to": [], "gradient_checkpointing": False}
    options |= {"num_generations": 4, "per_device_train_batch_size": 16, "num_train_epochs": 3}
    options |= {"max_completion_length": 48, "temperature": 0.6, "learning_rate": 1e-5}
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=reward,
        args=GRPOConfig(output_dir=out, **options),
        train_dataset=Dataset.from_list(prompts),
    )
    attach(trainer, drafts=drafts)
    trainer.train()
    digest = hashlib.sha256()
    for weight in trainer.model.cpu().parameters():
        digest.update(weight.detach().contiguous().view(torch.uint8).numpy())
    return [each for each in trainer.state.log_history if "loss" in each], digest.hexdigest()


with TemporaryDirectory() as out:
    (drafted, weights), (plain, others) = (train(out, drafts=each) for each in (True, False))
print("epoch  drafts     tokens_hash  reward  forwards  seconds")
for both in zip(drafted, plain, strict=True):
    for drafts, log in zip(("yes", "no"), both, strict=True):
        tokens, forwards = log["fastdraft/tokens_hash"], log["fastdraft/forwards"]
        shown = f"{tokens:16.0f}  {log['reward']:.4f}  {forwards:8.0f}"
        print(f"{log['epoch']:5.0f}  {drafts:6}{shown}  {log['fastdraft/seconds']:7.1f}")
print(f"weights with drafts  {weights}\nweights without      {others}")
assert weights == others
