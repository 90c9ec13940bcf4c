"""Growth is told from noise."""

import os

import numpy as np
import pytest

from tools.faults.growth import ProcessSample, growths, sample, slope

MB = 1 << 20


def series(anon, descriptors=20):
    """A sample a second; `anon` bytes of each."""
    return [
        ProcessSample(float(i), int(a), 5 * MB, descriptors, 9, 300, MB) for i, a in enumerate(anon)
    ]


def grown(samples):
    return [g.figure for g in growths(samples, 0.2) if not g.flat]


def test_noise_and_a_warm_up_are_flat():
    rng = np.random.default_rng(1)
    anon = 100 * MB + rng.integers(-3 * MB, 3 * MB, 600)
    anon[:100] //= 2
    anon[300] += 500 * MB  # a single peak
    assert grown(series(anon)) == []


def test_a_leak_is_found_within_noise():
    rng = np.random.default_rng(2)
    anon = 100 * MB + rng.integers(-3 * MB, 3 * MB, 600) + np.arange(600) * (6 * MB // 600)
    assert grown(series(anon)) == ["anon_bytes"]


def test_a_descriptor_that_stays_is_found():
    samples = series([100 * MB] * 600)
    samples = [s._replace(descriptors=20 + (s.at_s > 560)) for s in samples]
    assert grown(samples) == ["descriptors"]


def of_sessions(stays=0):
    """Threads: 16, up to 8 of sessions, more of which come later on; `stays` that never end."""
    rng = np.random.default_rng(3)
    own = rng.integers(0, 5, 600) + rng.integers(0, 5, 600) * (np.arange(600) > 300)
    return [
        s._replace(threads=16 + int(n) + stays * (s.at_s > 400))
        for s, n in zip(series([100 * MB] * 600), own, strict=True)
    ]


def test_threads_of_sessions_are_no_growth_and_one_that_stays_is():
    assert grown(of_sessions()) == []
    assert grown(of_sessions(1)) == ["threads"]


def with_loads(samples, at, kilobytes=64):
    """The same, but machine code comes at these seconds, a kernel a time."""
    return [
        s._replace(code_bytes=MB + 1024 * kilobytes * sum(s.at_s >= t for t in at)) for s in samples
    ]


def test_what_comes_with_machine_code_is_no_growth():
    anon = (
        np.full(600, 100 * MB) + 3 * MB * (np.arange(600) > 297) + 3 * MB * (np.arange(600) > 520)
    )
    assert grown(series(anon)) == ["anon_bytes"]
    assert grown(with_loads(series(anon), [300])) == ["anon_bytes"]
    assert grown(with_loads(series(anon), [300, 519])) == []


def test_a_leak_is_found_between_loads():
    samples = series(100 * MB + np.arange(600) * (6 * MB // 600))
    assert grown(with_loads(samples, [150, 300, 450])) == ["anon_bytes"]


def test_machine_code_may_not_grow_for_ever():
    loads = range(130, 600, 20)
    assert grown(with_loads(series([100 * MB] * 600), loads)) == ["code_bytes"]


def test_what_shrinks_is_flat():
    assert grown(series(100 * MB - np.arange(300) * MB // 10)) == []


def of_attached(count, stays=0):
    """A trainer that has touched from none to all of 20 MB, twice; `stays` mappings that it keeps.

    count   samples
    """
    touched = np.abs(np.arange(count) % (count // 2) - count // 4) * 80 // count * MB
    return [
        s._replace(shared_bytes=int(n), arenas=1 + stays * (s.at_s > 400))
        for s, n in zip(series([100 * MB] * count), touched[::-1], strict=True)
    ]


def test_what_comes_and_goes_is_held_against_its_bound():
    bounds = {"shared_bytes": 20 * MB, "arenas": 1}

    def beyond(samples):
        return [g.figure for g in growths(samples, 0.2, bounds=bounds) if not g.flat]

    samples = of_attached(600)
    assert grown([s for s in samples if s.at_s > 300]) == ["shared_bytes"]
    assert beyond([s for s in samples if s.at_s > 300]) == []
    assert beyond(of_attached(600, stays=1)) == ["arenas"]
    samples[500] = samples[500]._replace(shared_bytes=21 * MB)  # another mapping, for a moment
    assert beyond(samples) == ["shared_bytes"]


def test_too_few_samples_are_no_verdict():
    with pytest.raises(ValueError, match="9 samples are left"):
        growths(series([MB] * 11), 0.2)


def test_the_slope_is_the_median_one():
    times = np.arange(50.0)
    values = 3 * times + 1
    values[7] = 1e9
    assert slope(times, values) == pytest.approx(3)


def test_a_process_is_looked_at():
    now = sample(os.getpid(), 1.5)
    assert now.at_s == 1.5
    assert min(now.anon_bytes, now.descriptors, now.threads, now.mappings) > 0
    assert now.code_bytes >= 0
    with pytest.raises(FileNotFoundError):
        sample(2**22 + 1, 0)
