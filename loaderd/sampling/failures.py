"""Errors of batches that could not be built, and of the threads of sessions."""

import logging
from collections.abc import Callable

from blockstore.errors import StoreError
from loaderd.api.errors import BatchFailed, DaemonError
from loaderd.api.protocol import ErrorReply
from loaderd.plans.base import Wanted

log = logging.getLogger(__name__)


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


def run_guarded(loop: Callable[[], object], failed: Callable[[Exception], None]) -> None:
    """Run what a thread of a session does until it ends.

    failed   takes an error that nobody foresaw: a defect, after which nothing more comes
    """
    try:
        loop()
    except Exception as error:
        log.exception("a thread of a session ended")
        failed(error)
