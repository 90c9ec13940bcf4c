"""Progress that nobody sees."""

import io

from preprocess.pipeline.progress import Progress

QUIET = Progress(io.StringIO())
