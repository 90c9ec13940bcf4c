"""`blockstore push` and `pull`, and an ingest whose store goes to object storage."""

import os
from pathlib import Path

from blockstore.objects.bucket import parse_url
from blockstore.objects.push import pull, push, store_bytes
from blockstore.objects.remote import store_name
from blockstore.store import open_store
from preprocess.errors import BadInput
from preprocess.pipeline.progress import Progress


def run_push(path: Path, url: str, wait_s: float) -> str:
    """What was done.  Raises BadInput: no URL; and what `push` does."""
    place, store = _url(url), open_store(path)
    with Progress().stage("push", store_bytes(store), "B") as stage:
        fingerprint = push(store, place, wait_s, stage.advance)
    return f"{place}: pushed, fingerprint {fingerprint}"


def run_pull(url: str, target: Path, wait_s: float) -> str:
    """What was done.  Raises BadInput: no URL; and what `pull` does."""
    place = _url(url)
    store = pull(place, target, wait_s, lambda total: Progress().stage("pull", total, "B"))
    return f"{target}: pulled, fingerprint {store.manifest.fingerprint}"


def place_for(url: str, work: Path | None) -> Path:
    """Where a store is made that is to be pushed.  Raises BadInput."""
    if work is None:
        raise BadInput.at(
            url, "no --work", "a folder of this machine beside a URL",
            "name one with room for the store, such as --work /scratch",
        )  # fmt: skip
    local = work / store_name(url)
    if os.path.lexists(local):
        raise BadInput.at(
            "--work", f"{local}, which is there already", "no such folder",
            f"if it is the store of a run that was stopped: blockstore push {local} {url}",
        )  # fmt: skip
    return local


def _url(text: str) -> str:
    if not (found := parse_url(text)):
        raise BadInput.at(text, "a path", "a URL such as s3://BUCKET/NAME", "name the bucket")
    return found
