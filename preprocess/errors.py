"""What can be wrong with an input."""


class BadInput(ValueError):
    """A source cannot be taken as it is; the message names file, place, found and expected."""
