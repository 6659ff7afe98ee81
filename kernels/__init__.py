"""Verification on tensors: what a target model's logits make of a draft; and drafts on a device.

`fastdraft.kernels.reference` defines every operation in plain PyTorch. The modules here know numpy
and torch alone, never the rest of fastdraft; `fastdraft.verification` and `fastdraft.alignment` are
the checked entries to them.
"""
