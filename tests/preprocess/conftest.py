"""Settings for all tests of the pipeline, which also run without the JIT."""

from hypothesis import settings
from numba import config

settings.register_profile("compiled", deadline=None)  # first calls compile
settings.register_profile("plain", deadline=None, max_examples=10)
settings.load_profile("plain" if config.DISABLE_JIT else "compiled")
