"""The fingerprint of a store: of its content and layout, whatever made it and when."""

import hashlib

import msgspec

from blockstore.format import Manifest


def make_fingerprint(manifest: Manifest, digests: dict[str, bytes]) -> str:
    """32 hex digits over the manifest and the blake2b digests of all side arrays, by path.

    The page crcs are side arrays, so every page counts.  Source: FORMAT.md, "Fingerprint".
    """
    bare = msgspec.structs.replace(manifest, fingerprint="")
    total = hashlib.blake2b(msgspec.json.encode(bare, order="sorted"), digest_size=16)
    for path in sorted(digests):
        total.update(path.encode() + b"\0" + digests[path])
    return total.hexdigest()
