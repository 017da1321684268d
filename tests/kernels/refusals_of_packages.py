"""How a stand-in refuses what its package refuses."""


class RefusedError(RuntimeError):
    """The package's own refusal."""


def want(condition: object, text: str) -> None:
    """A check of the package, with the words that it refuses in."""
    if not condition:
        raise RefusedError(text)
