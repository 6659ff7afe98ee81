"""Verification on tensors: what a target model's logits make of a draft.

`fastdraft.kernels.reference` defines every operation in plain PyTorch. The modules here know
torch alone, never the rest of fastdraft; `fastdraft.verification` is the checked entry to them.
"""
