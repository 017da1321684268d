"""The contract of expertd: messages, wire codec, error table, placement.  Needs grpcio and protobuf, nothing else.

expertd.v1                 the generated classes of expertd.v1
expertd.codec              bytes <-> values for the messages with tensors, without copies
expertd.errors             every error that crosses the wire, one class a row
expertd.placement          which server holds which experts
expertd.common.dtypes      the words for element types, "bf16", and their numbers in the contract
expertd.common.ranges      sets of numbers as people write them, "0-3,7"
expertd.common.hostmem     the C allocator, tuned for large messages

Names are imported when they are first used: `python -m expertd.cxx` runs in a checkout of which nothing is installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expertd.errors import ExpertdError
    from expertd.placement import Placement

__all__ = ["ExpertdError", "Placement", "__version__"]

__version__: str
_MODULES = {"ExpertdError": "errors", "Placement": "placement"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("expertd")
        except PackageNotFoundError:  # a checkout that is only on the path
            return "0+checkout"
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
