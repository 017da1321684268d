"""A client in shared memory that another process looks at between any two of its instructions.

python steps.py FD    gets its region from the Unix socket FD, submits once, lets itself be traced, submits again
"""

import ctypes as C
import os
import signal
import socket
import sys

from expertd.shm import layout
from expertd.shm.client import Client
from expertd.shm.layout import Submission
from expertd.shm.region import Region

_TRACE_ME = 0


def main() -> int:
    with socket.socket(fileno=int(sys.argv[1])) as source:
        client = Client(Region.receive(source))
        client.submit(Submission(kind=layout.FORWARD, layer=1, tokens=1))
        if C.CDLL(None).ptrace(_TRACE_ME, 0, None, None):
            return 1
        os.kill(os.getpid(), signal.SIGSTOP)
        client.submit(Submission(kind=layout.FORWARD, layer=2, tokens=2, top_k=2, hidden=2, out=2, deadline_ns=2))
        return 0


if __name__ == "__main__":
    sys.exit(main())
