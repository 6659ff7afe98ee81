"""Lets torchvision be imported where its wheel, built for CUDA, does not find its operations."""

from __future__ import annotations

import torch

for name in ("nms", "qnms"):
    torch.library.define(
        f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    )
