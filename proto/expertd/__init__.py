"""The contract of expertd: messages, wire codec, error table, placement.  Needs grpcio and protobuf, nothing else.

expertd.v1          the generated classes of expertd.v1
expertd.wire        bytes <-> values for the messages with tensors, without copies
expertd.errors      every error that crosses the wire, one class a row
expertd.placement   which server holds which experts
expertd.dtypes      the words for element types, "bf16", and their numbers in the contract
expertd.ranges      sets of numbers as people write them, "0-3,7"
expertd.hostmem     the C allocator, tuned for large messages
"""

from importlib.metadata import version

from expertd.errors import ExpertdError
from expertd.placement import Placement

__all__ = ["ExpertdError", "Placement", "__version__"]

__version__ = version("expertd")
