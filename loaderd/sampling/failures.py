"""Error replies for batches that could not be built."""

from blockstore.errors import StoreError
from loaderd.api.errors import BatchFailed, DaemonError
from loaderd.api.protocol import ErrorReply
from loaderd.plans.base import Wanted


def error_text(error: BaseException) -> str:
    """The error in one line, preceded by its class if nobody foresaw it."""
    known = isinstance(error, StoreError | DaemonError | OSError)
    return str(error) if known else f"{type(error).__name__}: {error}"


def failure(session: int, wanted: Wanted, text: str, step: int = -1) -> ErrorReply:
    """The reply that ends a run: this batch of it could not be built.

    step   as the text names it, if the batch has a position instead
    """
    return ErrorReply(
        error=BatchFailed.__name__,
        message=f"epoch {wanted.epoch}, step {wanted.step if step < 0 else step}: {text}",
        session=session,
        run=wanted.run,
        step=wanted.step,
    )
