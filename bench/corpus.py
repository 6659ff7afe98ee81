"""Real text as token ids: the Python sources of the running interpreter's standard library.

They are on every machine that runs the benchmarks, and code is what repeats itself most. The text
is cut into words, runs of blanks and single marks, numbered as they appear.
"""

from __future__ import annotations

import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_WORD_OR_MARK = re.compile(r"\w+| +|\n+|[^\w \n]")


def _texts() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(root.rglob("*.py"))
    # In their own order a folder of tables would be all that a long context goes on with.
    random.Random(0).shuffle(paths)
    for path in paths:
        if not {"site-packages", "test", "tests", "idlelib"} & set(path.parts):
            yield path.read_text(encoding="utf-8", errors="replace")


def tokens(count: int) -> np.ndarray:
    """Returns the first `count` token ids of the corpus, int32.

    Raises ValueError where the corpus has fewer tokens.
    """
    vocabulary: dict[str, int] = {}
    ids: list[int] = []
    for text in _texts():
        words = _WORD_OR_MARK.findall(text)
        ids += [vocabulary.setdefault(word, len(vocabulary)) for word in words]
        if len(ids) >= count:
            break
    if len(ids) < count:
        raise ValueError(f"count must be at most the corpus's {len(ids)} tokens, got {count}")
    return np.array(ids[:count], dtype=np.int32)
