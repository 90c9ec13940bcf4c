"""The doctor's judgements, and its reading of a disk."""

import resource

import pytest

from loaderd.monitoring import doctor
from loaderd.monitoring.doctor import MachineCheck, State, checks_text, measure_disk

G = 1 << 30


@pytest.mark.parametrize(
    ("check", "state"),
    [
        (doctor.judge_kernel("6.1.0-18-amd64"), "ok"),
        (doctor.judge_kernel("5.10.0"), "warn"),
        (doctor.judge_kernel("strange"), "warn"),
        (doctor.judge_queue(""), "ok"),
        (doctor.judge_queue("io_uring is refused (Operation not permitted)"), "warn"),
        (doctor.judge_kernel_cache("/home/x/.cache"), "ok"),
        (doctor.judge_kernel_cache(None), "warn"),
        (doctor.judge_cores(1), "warn"),
        (doctor.judge_cores(8), "ok"),
        (doctor.judge_memory(2 * G, 8 * G, "free memory"), "ok"),
        (doctor.judge_memory(8 * G, 8 * G, "free memory"), "warn"),
        (doctor.judge_memory(9 * G, 8 * G, "the control group at /x"), "fail"),
        (doctor.judge_memlock(resource.RLIM_INFINITY, G), "ok"),
        (doctor.judge_memlock(8 << 20, G), "warn"),
        (doctor.judge_swap(0), "ok"),
        (doctor.judge_swap(1 << 20), "warn"),
        (doctor.judge_files(1024, 1024, 10), "ok"),
        (doctor.judge_files(256, 4096, 100), "warn"),
        (doctor.judge_files(256, 256, 400), "fail"),
        (doctor.judge_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY, 10), "ok"),
        (doctor.judge_shm(64 << 20), "warn"),
        (doctor.judge_shm(8 * G), "ok"),
        (doctor.judge_disk(100e6, True), "warn"),
        (doctor.judge_disk(3e9, False), "ok"),
        (doctor.judge_pages(64 << 20, 64 << 20), "ok"),
        (doctor.judge_pages(0, 64 << 20), "warn"),
        (doctor.judge_disks({"/a": 9e8, "/b": 7e8, "/c": 9e8}), "ok"),
        (doctor.judge_disks({"/a": 9e8, "/b": 5e8}), "warn"),
    ],
)
def test_judgements(check, state):
    assert check.state == state
    assert bool(check.remedy) == (state != "ok")


def test_a_fix_that_is_within_reach_is_named():
    assert "ulimit -n" in doctor.judge_files(256, 4096, 100).remedy
    assert "LimitNOFILE" in doctor.judge_files(256, 256, 100).remedy
    assert "--mem 6.4G" in doctor.judge_memory(9 * G, 8 * G, "free memory").remedy
    assert "waits for /b: replace it" in doctor.judge_disks({"/a": 9e8, "/b": 5e8}).remedy
    assert "compact_memory" in doctor.judge_pages(0, 64 << 20).remedy


def test_what_to_do_stands_below_its_check():
    text = checks_text(
        [MachineCheck("a", State.ok, "x"), MachineCheck("b", State.warn, "y", "do z")]
    )
    assert text.splitlines() == [
        "check        found",
        "a      ok    x",
        "b      warn  y",
        "   -> do z",
    ]


def test_bytes_read_are_counted(tmp_path):
    path = tmp_path / "shard"
    path.write_bytes(b"x" * (3 << 20))
    assert measure_disk([path], direct=False, seconds=0.05) > 1 << 20
    path.write_bytes(b"x" * 4096)  # shorter than a piece
    assert measure_disk([path], direct=False, seconds=0.02) > 0
