"""A memory on the disk, a fleet of one: what was said is there again, however a process ended."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

from fastdraft import Datastore
from fleets import join, say
from killed_memory import check_killed, restored
from random_cases import cases


@pytest.mark.parametrize("alphabet", [2, 100_000])
def test_much_text_is_saved_and_read_whole(tmp_path: Path, alphabet: int) -> None:
    text = np.random.default_rng(0).integers(0, alphabet, 300_000)
    replica = join(str(tmp_path), memory_bytes=64 << 20)
    for part in np.split(text, 100):
        say(replica, "much", part.tolist())
    replica.close()
    found = restored(tmp_path, "much")
    assert [len(part) for part in found] == [3000] * 100
    assert np.array_equal(np.concatenate(found), text)


@cases(1)
def test_a_writer_is_killed_at_any_instant(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_killed(Path(folder), 10, seed)


# --- Documents of one store in another ---


def test_all_documents_of_a_store_are_added() -> None:
    source, copy = Datastore(max_bytes=1 << 20), Datastore(max_bytes=1 << 20)
    chat = list(range(200))
    source.add(chat[:100], prompt_size=40)
    source.add(chat, prompt_size=150)  # its beginning is stored once
    source.add([7] * 5000, prompt_size=4990)
    middle = source.end
    source.add([8, 8])
    for begin, most in ((0, middle), (middle, 1 << 30)):
        dump, end = source._dump(begin, most)
        copy._load(dump, None)
    assert end == source.end and len(source) == len(copy)
    for text in (chat[:50], chat[:120], chat[:180], [7] * 20, [8]):
        for a, b in zip(source.find(text), copy.find(text), strict=True):
            assert (a.length, a.output) == (b.length, b.output)
            assert source.read(a.next, 20).tolist() == copy.read(b.next, 20).tolist()
    with pytest.raises(ValueError, match="text must have 5 bytes a token, got 7"):
        copy._load(b"1234567", None)
