"""A program as `expertd`, with one row more, before all others, whose layers go wrong as a test wants it."""

_PROGRAM = """
import sys
from dataclasses import replace
import torch
from expertd_kernels.backends import reference
from expertd_kernels.oracle import table
{experts}
module = type(sys)("faulty_backend")
module.pack = reference.pack
module.experts = lambda packed, problem: Experts(reference.unpack(packed))
sys.modules["faulty_backend"] = module
row = next(b for b in table.BACKENDS if b.name == "reference")
table.BACKENDS = (replace(row, name="faulty", target="faulty_backend"), row)
table.ORDER = {{}}
from expertd_server.commands.cli import main
sys.exit(main(sys.argv[1:]))
"""


def faulty_program(experts: str) -> str:
    """Its text.  experts: the text of a class Experts(reference.ReferenceExperts), and what it needs."""
    return _PROGRAM.format(experts=experts)
