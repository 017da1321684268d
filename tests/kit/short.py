"""A process that has no descriptor, or no thread, left."""

import errno
import os
import socket
import threading


class Shortage:
    """While `lasts`, what would take a descriptor by accept() raises, and `asked` counts."""

    def __init__(self, monkeypatch):
        self.lasts, self.asked = False, 0
        accept = socket.socket.accept

        def short(sock):
            if self.lasts:
                self.asked += 1
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return accept(sock)

        monkeypatch.setattr(socket.socket, "accept", short)


class NoThreads:
    """While `lasts`, threads whose target has this name cannot be started; `asked` counts."""

    def __init__(self, monkeypatch, target):
        self.lasts, self.asked = True, 0
        start = threading.Thread.start

        def short(thread):
            if self.lasts and getattr(getattr(thread, "_target", None), "__name__", "") == target:
                self.asked += 1
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", short)
