"""A refusal that comes when weights are packed.  Ground floor: imports nothing."""

__all__ = ["Refused"]


class Refused(Exception):  # noqa: N818 - a value with a reason that a backend raises from pack() or experts()
    """A backend does not serve these weights: the table's rules say so of what was read, or the packer of its values.
    The text is the refusal."""
