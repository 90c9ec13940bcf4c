"""What a client is told of a batch that could not be built."""

from blockstore.errors import StoreError
from loaderd.api.errors import BatchFailed, DaemonError
from loaderd.api.protocol import ErrorReply
from loaderd.plans.base import Wanted


def error_text(error: BaseException) -> str:
    """One line; the class of an error that nobody foresaw stands before it."""
    known = isinstance(error, StoreError | DaemonError | OSError)
    return str(error) if known else f"{type(error).__name__}: {error}"


def failure(session: int, wanted: Wanted, text: str, step: int = -1) -> ErrorReply:
    """Nothing more comes of a run: this batch of it could not be built.

    step   as the text names it, if that of the batch is another position
    """
    return ErrorReply(
        error=BatchFailed.__name__,
        message=f"epoch {wanted.epoch}, step {wanted.step if step < 0 else step}: {text}",
        session=session,
        run=wanted.run,
        step=wanted.step,
    )
