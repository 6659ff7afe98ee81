"""Replicas over a store that fails at random: nothing is lost, twice, or served once forgotten."""

from __future__ import annotations

import contextlib
import random
from collections import Counter

from chaos_store import ChaosStore
from fastdraft import Datastore
from fastdraft.errors import DatastoreError
from fastdraft.memory.sharing import Objects, Replica
from fleets import KEY, folder_of, join, texts

__all__ = ["check_chaos"]

URL = "chaos://bucket/fleet"
NAMESPACES = ("a", "b", None)


def check_chaos(seed: int, documents: int) -> Counter[str]:
    """Says so many documents at replicas that come and go, and forgets some namespaces."""
    chance = random.Random(seed)
    ChaosStore.begin(seed)
    ChaosStore.faulty = True
    replicas = [_quiet(join(URL)) for _ in range(4)]
    said: dict[Replica, set[tuple[str | None, int]]] = {replica: set() for replica in replicas}
    every: set[tuple[str | None, int]] = set()
    safe: set[tuple[str | None, int]] = set()  # acknowledged
    dead: set[tuple[str | None, int]] = set()  # said before their namespace was forgotten
    found = Counter[str]()
    for number in range(documents):
        place = chance.randrange(len(replicas))
        replica = replicas[place]
        name = chance.choice(NAMESPACES)
        tokens = range(number * 8, number * 8 + 8)
        replica.memory.of(name)[0].add(list(tokens))
        said[replica].add((name, number))
        every.add((name, number))
        if chance.random() < 0.2:
            replica.find([chance.choice(NAMESPACES)])
            # In an outage every call fails. Threads share the dice: without one, no refresh is sure
            # to fail, since a call is tried again.
            outage = number > documents // 2 and not found["outages"]
            ChaosStore.failing = 1.0 if outage else 0.05
            if replica.refresh():
                assert not outage
                found["refreshes"] += 1
                safe |= _acknowledged(replica, said) - dead
            found["outages"] += outage
            ChaosStore.failing = 0.05
        if chance.random() < 0.01:
            # Killed: what was not acknowledged may be lost.
            del said[replica]
            replicas[place] = _quiet(join(URL))
            said[replicas[place]] = set()
        if chance.random() < 0.02:
            _junk(chance)
        if chance.random() < 0.004 and _forgotten(name):
            found["forgotten"] += 1
            dead |= {each for each in every if each[0] == name}
            safe -= dead
    ChaosStore.faulty = False
    for replica in replicas:
        assert replica.refresh(), replica.faults
        safe |= _acknowledged(replica, said) - dead
    reader = join(URL, memory_bytes=64 << 20)
    reader.find(NAMESPACES)
    assert reader.refresh(), reader.faults
    for name in NAMESPACES:
        times = Counter(token // 8 for text in texts(reader.find([name])) for token in text)
        assert set(times.values()) <= {8}, f"twice: {[n for n in times if times[n] > 8]}"
        lost = {number for each, number in safe if each == name} - times.keys()
        assert not lost, f"lost: {sorted(lost)}"
        served = {number for each, number in dead if each == name} & times.keys()
        assert not served, f"served after it was forgotten: {sorted(served)}"
    reader.close()
    return found + Counter({"documents": documents, "acknowledged": len(safe)})


def _quiet(replica: Replica) -> Replica:
    """Without its thread: text that is published while its namespace is forgotten may go too."""
    replica.close()
    return replica


def _acknowledged(
    replica: Replica, said: dict[Replica, set[tuple[str | None, int]]]
) -> set[tuple[str | None, int]]:
    """What the replica has published. What it has dropped, since its namespace was forgotten, is
    not acknowledged."""
    held = {name: _held(replica.memory.find([name])) for name in NAMESPACES}
    done = {(name, number) for name, number in said[replica] if number in held[name]}
    said[replica] = set()
    return done


def _held(stores: list[Datastore]) -> set[int]:
    """The documents whose tokens are in stores."""
    return {token // 8 for text in texts(stores) for token in text}


def _forgotten(name: str | None) -> bool:
    """Forgets a namespace, as an operator who tries again; whether there was anything."""
    objects = Objects(URL, KEY)
    group, _, folder = folder_of(URL, name).partition("/")
    for _ in range(100):
        with contextlib.suppress(DatastoreError, OSError):
            return objects.forget(group, folder)
    raise AssertionError("it cannot be forgotten")


def _junk(chance: random.Random) -> None:
    """An object of somebody without the key."""
    name = chance.choice(["f" * 32 + "-99999999999999999999", "x", "0", "\N{SNOWMAN}" * 9])
    folder = folder_of(URL, chance.choice(NAMESPACES))
    place = chance.choice([folder, folder.partition("/")[0], "0" * 64, ""])
    ChaosStore.faulty = False
    ChaosStore().pipe_file(
        f"{URL}/{place}/{name}", chance.randbytes(chance.choice([0, 1, 1 << 17]))
    )
    ChaosStore.faulty = True
