"""Verification on tensors: what a target model's logits make of a draft; and drafts on a device.

An operation is a file: its plain version, which defines it and runs on a CPU, above its Triton
kernel and the launcher of that. The modules here know numpy, torch, Triton and the core's random
numbers alone, never the rest of fastdraft. Their checked entries are `fastdraft.verification` and
`fastdraft.late.alignment`.
"""
