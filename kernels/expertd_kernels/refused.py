"""A backend's refusal, found where the table could not tell.  Ground floor: imports nothing."""

__all__ = ["Refused"]


class Refused(Exception):  # noqa: N818 - a value with a reason that a backend raises from pack() or experts()
    """A backend found at pack time that it cannot serve these weights; the text is the refusal."""
