"""The process that fuzzes: coverage of what looks at a message steers what is sent next."""

import json
import sys
from pathlib import Path
from random import Random

import atheris

with atheris.instrument_imports(
    include=["loaderd.protocol", "loaderd.requests", "loaderd.engine.resolve", "tools.fuzz.frames"]
):
    from tools.fuzz import frames

from blockstore.store import open_store
from tools.fuzz.attacker import EVERY, Attacker

LARGEST = 1 << 16  # bytes of an input


def main(words: list[str]) -> None:
    """Does not return: `ENDPOINT STORE VICTIM COUNT SEED NOTES CORPUS`.

    NOTES gets, again and again, a JSON object of what was sent and what came back.
    """
    endpoint, store, victim, count, seed, notes, corpus = words
    attacker = Attacker(endpoint, open_store(Path(store)).manifest, int(victim), Random(int(seed)))
    for number, message in enumerate(frames.base_messages()):
        (Path(corpus) / f"base-{number:02d}").write_bytes(frames.join(message))

    def note() -> None:
        figures = {
            "sent": attacker.sent, "noise": attacker.noise, "longest_s": attacker.longest_s,
            "replies": dict(attacker.replies),
        }  # fmt: skip
        fresh = Path(notes).with_suffix(".new")
        fresh.write_text(json.dumps(figures))
        fresh.replace(notes)

    def one(data: bytes) -> None:
        if attacker.sent >= int(count):
            return
        attacker.send(data)
        if attacker.sent == int(count):
            attacker.check()
            attacker.close()
        if attacker.sent % EVERY == 0 or attacker.sent == int(count):
            note()

    def spoil(data: bytes, most: int, seed: int) -> bytes:
        return frames.spoil(data, Random(seed), lambda d: bytes(atheris.Mutate(d, most)))[:most]

    options = [f"-seed={seed}", f"-max_len={LARGEST}", "-len_control=0", "-use_value_profile=1"]
    # some inputs are run while the corpus is read: more runs than messages, all others do nothing
    options += [
        f"-runs={int(count) + 10_000}",
        "-print_final_stats=1",
        "-artifact_prefix=" + corpus,
    ]
    atheris.Setup(["fuzz", *options, corpus], one, custom_mutator=spoil)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
