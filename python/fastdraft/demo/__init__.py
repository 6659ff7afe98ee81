"""The demo: real requests decoded by a real model, plainly, with prompt lookup, and with fastdraft.

`ensure_model` fetches its model, `load_target` loads any. Importing this package needs the packages
of `fastdraft[cli]`; `fastdraft.demo.comparison` needs torch and transformers too.
"""

from __future__ import annotations

from fastdraft.demo.model import (
    DemoModelError,
    Request,
    Target,
    TargetError,
    demo_requests,
    ensure_model,
    load_target,
)

__all__ = [
    "DemoModelError",
    "Request",
    "Target",
    "TargetError",
    "demo_requests",
    "ensure_model",
    "load_target",
]
