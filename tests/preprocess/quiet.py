"""Progress that nobody sees."""

import io

from preprocess.progress import Progress

QUIET = Progress(io.StringIO())
