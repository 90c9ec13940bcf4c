"""A client's position in its epochs, and checks of a saved position; pure functions."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import msgspec

from loaderd.api.protocol import Resolved


class StateMismatch(ValueError):
    """A saved state belongs to another plan, store or sampler than the one it is loaded into."""


class Position(NamedTuple):
    """The last step consumed of an epoch, -1 before the first, by worker `worker` of `stride`."""

    epoch: int = 0
    step: int = -1
    worker: int = 0
    stride: int = 1

    def first_step(self, worker: int, stride: int) -> int:
        """The next step of worker `worker` of `stride`; its later steps are `stride` apart.

        A position of one worker of several says nothing of the others, so it fits that worker only.
        """
        if self.stride == 1 or self.step < 0:
            return self.step + 1 + worker
        if (self.worker, self.stride) != (worker, stride):
            raise StateMismatch(
                f"state was saved in worker {self.worker} of {self.stride}, "
                f"and is loaded in worker {worker} of {stride}"
            )
        return self.step + stride

    def normalized(self, num_steps: int) -> Self:
        """The same position, with an epoch's end turned into the next epoch's start.

        A position of one worker of several is unchanged: the others may not be at the end yet.
        """
        if self.step < 0 or self.stride > 1 or self.step + 1 < num_steps:
            return self
        return type(self)(self.epoch + 1)


def dump_state(resolved: Resolved, position: Position) -> dict[str, Any]:
    """Plain numbers, strings, lists and dicts, for a checkpoint."""
    plan: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(resolved))
    return {"resolved": plan, **position._asdict()}


def parse_state(state: Mapping[str, Any]) -> tuple[Resolved, Position]:
    """Parse the result of `dump_state`.  Raises StateMismatch: it is something else."""
    try:
        resolved = msgspec.convert(state["resolved"], Resolved)
        position = Position(*(int(state[name]) for name in Position._fields))
    except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise StateMismatch(
            f"state: {type(error).__name__}: {error}, expected what a dataset's state_dict() gave"
        ) from error
    epoch, step, worker, stride = position
    if epoch < 0 or step < -1 or not 0 <= worker < stride:
        raise StateMismatch(f"state: found {position}, expected what a dataset's state_dict() gave")
    return resolved, position


def check_resolved(saved: Resolved, found: Resolved) -> None:
    """Raise StateMismatch, naming each difference, unless both give the same batches."""
    differences = [
        f"{name} {getattr(saved, name)!r} (now {getattr(found, name)!r})"
        for name in Resolved.__struct_fields__
        if getattr(saved, name) != getattr(found, name)
    ]
    if differences:
        raise StateMismatch("state was saved with " + ", ".join(differences))
