"""Real text as token ids: the Python sources of the running interpreter's standard library.

They are on every machine that runs the benchmarks, and code is what repeats itself most. A Hugging
Face tokenizer cuts the text where one is given; otherwise it is cut into words, runs of blanks and
single marks, numbered as they appear.

As a script it writes the ids as int32 to a file, which bench/datastore.py takes:

    python bench/corpus.py tokens.bin --tokenizer FOLDER
"""

from __future__ import annotations

import argparse
import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fastdraft.replay.tokenizer import TextTokenizer

_WORD_OR_MARK = re.compile(r"\w+| +|\n+|[^\w \n]")


def _texts() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(root.rglob("*.py"))
    # In their own order a folder of tables would be all that a long context goes on with.
    random.Random(0).shuffle(paths)
    for path in paths:
        if not {"site-packages", "test", "tests", "idlelib"} & set(path.parts):
            yield path.read_text(encoding="utf-8", errors="replace")


def tokens(count: int, tokenizer: Path | None = None) -> np.ndarray:
    """Returns the first `count` token ids of the corpus, int32.

    `tokenizer` is the folder of a Hugging Face tokenizer. Raises ValueError where the corpus has
    fewer tokens.
    """
    vocabulary: dict[str, int] = {}

    texts = None if tokenizer is None else TextTokenizer(tokenizer)

    def encode(text: str) -> Sequence[int]:
        if texts is not None:
            return texts.encode([text])[0]
        words = _WORD_OR_MARK.findall(text)
        return [vocabulary.setdefault(word, len(vocabulary)) for word in words]

    ids: list[int] = []
    for text in _texts():
        ids += encode(text)
        if len(ids) >= count:
            break
    if len(ids) < count:
        raise ValueError(f"count must be at most the corpus's {len(ids)} tokens, got {count}")
    return np.array(ids[:count], dtype=np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER")
    parser.add_argument("--count", type=int, default=1_200_000)
    arguments = parser.parse_args()
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    tokens(arguments.count, arguments.tokenizer).tofile(arguments.file)


if __name__ == "__main__":
    main()
