"""The files of a source as they were when it was opened."""

import os

from preprocess.pipeline.work import sign
from preprocess.sources.sourcefiles import SourceFiles


def test_the_signature_is_of_size_time_and_content(tmp_path):
    source = tmp_path / "source.npy"

    def signed(content: bytes, time_ns: int, fact: int = 1) -> str:
        source.write_bytes(content)
        os.utime(source, ns=(1, time_ns))
        return sign({"a": fact}, SourceFiles([source]).digest())

    first = signed(bytes(1000), 1000)
    assert signed(bytes(1000), 1000) == first
    assert signed(bytes(1000), 1000, fact=2) != first
    assert signed(bytes(1000), 1001) != first
    assert signed(bytes(999) + b"x", 1000) != first
    assert signed(bytes(1001), 1000) != first
