"""What files of certificates and callers, and clients' handshakes, can do to those who call: an mTLS server of `tiny`.

    python tests/load/hostile_tls.py [ATTACK ...] [--seconds 3] [--json]

For each attack: two servers (`expertd serve`, mTLS, a file of callers, connections over TCP), the one attacked, the
other a control.  One honest client asks both in turn on streams that stand, another one with a new connection each
time.  Prints of both the answers, p99 and the longest wait, and what failed; then whether a certificate that is
replaced in the end is taken.  Exit code 1: a failure, a wrong answer, a certificate that is not taken, or more than
--most-memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import stat
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rpc" / "server"))

from certificates import Authority
from hostile import ROOT, Server

from expertd.errors import ExpertdError
from expertd_client import Credentials, ExpertClient

SERVE = ["--synthetic", "tiny:int4_g128", "--device", "cpu", "--backend", "reference", "--threads", "1", "--tcp", "on"]
IDS, HIDDEN = np.tile(np.arange(2, dtype=np.int32), (3, 1)), np.ones((3, 256), np.float32)
WEIGHTS = np.full((3, 2), 0.5, np.float32)


class Site:
    """One server and its files: `cert`, `key`, `trusted`, `callers`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.pki, self.foreign = Authority(folder / "pki"), Authority(folder / "foreign", "foreign")
        self.cert, self.key = self.pki.sign("localhost")
        self.trusted, self.callers = folder / "trusted.pem", folder / "callers.toml"
        self.trusted.write_bytes(self.pki.ca.read_bytes())
        self.callers.write_text('[callers.honest]\ncertificates = ["honest"]\nrights = ["call", "describe"]\n')
        self.shown = Credentials(True, self.pki.ca, *self.pki.sign("honest"))
        options = ["--tls-cert", self.cert, "--tls-key", self.key, "--tls-client-ca", self.trusted]
        self.server = Server(ROOT, folder / "log", [*SERVE, *map(str, options), "--callers", str(self.callers)])
        self.log = folder / "log"

    def renew(self) -> None:
        """Its own authority's certificate again."""
        for path in (self.cert, self.key):
            path.unlink()
        self.pki.sign("localhost")

    def files(self) -> list[Path]:
        return [self.cert, self.key, self.trusted, self.callers]


class Honest:
    """Asks the sites in turn.  fresh: with a new connection each time."""

    def __init__(self, sites: dict[str, Site], fresh: bool) -> None:
        self.took: dict[str, list[float]] = {name: [] for name in sites}
        self.failures: Counter[str] = Counter()
        self._sites, self._fresh, self._right = sites, fresh, {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            stands = {} if self._fresh else {n: stack.enter_context(_client(s)) for n, s in self._sites.items()}
            while not self._over.is_set():
                for name, site in self._sites.items():
                    begin = time.monotonic()
                    try:
                        if self._fresh:
                            with _client(site) as client:
                                self._ask(client)
                        else:
                            self._ask(stands[name])
                        self.took[name].append(time.monotonic() - begin)
                    except (ExpertdError, AssertionError) as e:
                        self.failures[f"{name}: {str(e)[:120]}"] += 1
                self._over.wait(0.005)

    def _ask(self, client: ExpertClient) -> None:
        out = client.forward(0, HIDDEN, IDS, WEIGHTS).output.tobytes()
        assert self._right.setdefault("output", out) == out, "another answer"

    def end(self) -> None:
        self._over.set()
        self._thread.join(12)
        if self._thread.is_alive():
            self.failures["an honest client hangs"] += 1


def _client(site: Site) -> ExpertClient:
    return ExpertClient(site.server.address, credentials=site.shown, timeout_s=10)


# ---- attacks: each is called again and again with the site and the number of the call -------------------------------


def _put(path: Path, make: Callable[[Path], object]) -> None:
    """What `make` makes takes the place of `path` at once."""
    beside = path.with_name(path.name + ".next")
    if beside.is_dir():
        beside.rmdir()
    beside.unlink(missing_ok=True)
    make(beside)
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    if beside.is_dir():
        path.unlink(missing_ok=True)
    beside.rename(path)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 30)


def _instead(make: Callable[[Path], object]) -> Callable[[Site, int], None]:
    """One file after the other is replaced, and comes back."""

    def attack(site: Site, n: int) -> None:
        path = site.files()[n % len(site.files())]
        good = path.read_bytes()
        _put(path, make)
        time.sleep(0.4)
        _put(path, lambda p: p.write_bytes(good))

    return attack


def _renewed(site: Site, n: int) -> None:
    """In place: certificate, then key."""
    site.pki.sign("localhost")


def _swapped(site: Site, n: int) -> None:
    """A link that is swapped, as Kubernetes does it."""
    folder = site.cert.parent / f"v{n}"
    folder.mkdir()
    site.pki.sign("localhost")
    for path in (site.cert, site.key):
        (folder / path.name).write_bytes(path.read_bytes())
        _put(path, lambda p, path=path: p.symlink_to(folder / path.name))  # type: ignore[misc]


def _times(days: tuple[float, float]) -> Callable[[Site, int], None]:
    """Certificates of callers that are over, or are not yet: of strangers, who call."""

    def attack(site: Site, n: int) -> None:
        certificate, key = site.pki.sign(f"late{n}", days)
        _refused(site, Credentials(True, site.pki.ca, certificate, key))

    return attack


def _strangers(site: Site, n: int) -> None:
    certificate, key = site.foreign.sign("honest")
    _refused(site, Credentials(True, site.pki.ca, certificate, key))


def _unlisted(site: Site, n: int) -> None:
    certificate, key = site.pki.sign("nobody", alternative="honest.example")
    _refused(site, Credentials(True, site.pki.ca, certificate, key))


def _refused(site: Site, shown: Credentials) -> None:
    try:
        with ExpertClient(site.server.address, credentials=shown, timeout_s=2) as client:
            client.forward(0, HIDDEN, IDS, WEIGHTS)
    except ExpertdError:
        return
    raise SystemExit("hostile_tls: a stranger was answered")


HELLO = bytes.fromhex("16030101000100")  # a record of 256 bytes, of which one comes
_HALF: list[socket.socket] = []


def _half(site: Site, n: int) -> None:
    """500 that stop in the middle of their handshake, on gRPC's socket and on the TCP listener's."""
    host, _, port = site.server.address.rpartition(":")
    if len(_HALF) < 500:
        for _ in range(50):
            sock = socket.create_connection((host, int(port)), 5)
            sock.sendall(HELLO)
            _HALF.append(sock)
    time.sleep(0.02)


def _no_rights(path: Path) -> None:
    path.write_bytes(b"")
    path.chmod(0)


ATTACKS: dict[str, Callable[[Site, int], None]] = {
    "none": lambda site, n: time.sleep(0.1),
    "renewed in place": _renewed,
    "a link swapped": _swapped,
    "truncated": _instead(lambda p: p.write_bytes(b"-----BEGIN CERTIFICATE-----\nMIIB")),
    "empty, mode 0": _instead(_no_rights),
    "garbage": _instead(lambda p: p.write_bytes(os.urandom(4096))),
    "a folder": _instead(lambda p: p.mkdir()),
    "a pipe": _instead(os.mkfifo),
    "/dev/zero": _instead(lambda p: p.symlink_to("/dev/zero")),
    "a socket": _instead(lambda p: os.mknod(p, 0o600 | stat.S_IFSOCK)),
    "1 GiB": _instead(_sparse),
    "100,000 brackets": _instead(lambda p: p.write_bytes(b"a = " + b"[" * 100_000)),
    "gone": _instead(lambda p: p.symlink_to("/nowhere")),
    "expired callers": _times((-2, -1)),
    "callers of tomorrow": _times((1, 2)),
    "foreign callers": _strangers,
    "unlisted callers": _unlisted,
    "500 half handshakes": _half,
}


class Sites(dict[str, Site]):
    """The attacked one and the control, for as many attacks as they live through."""

    def __init__(self, folder: Path) -> None:
        super().__init__({which: Site(folder / which) for which in ("attacked", "control")})

    def __enter__(self) -> Sites:
        return self

    def __exit__(self, *_: object) -> None:
        for site in self.values():
            site.server.process.kill()
            site.server.process.wait()


def run(name: str, sites: dict[str, Site], seconds: float) -> dict[str, object]:
    attacked = sites["attacked"]
    before = len(attacked.log.read_text(errors="replace"))
    both = [Honest(sites, fresh) for fresh in (False, True)]
    time.sleep(1.0)
    base = most = attacked.server.memory()
    over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.02):
            most = max(most, attacked.server.memory())
            if most - base > 4 << 30:
                attacked.server.process.kill()

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    begin, n = time.monotonic(), 0
    while time.monotonic() - begin < seconds:
        ATTACKS[name](attacked, n)
        n += 1
    for honest in both:
        honest.end()
    while _HALF:
        _HALF.pop().close()
    over.set()
    watching.join()
    failures = both[0].failures + both[1].failures
    row: dict[str, object] = {"attack": name, "times": n, "memory_mb": round((most - base) / 1e6)}
    for kind, honest in zip(("stands", "new"), both, strict=True):
        for which, took in honest.took.items():
            row[f"{kind}, {which}"] = _said(took)
    row["taken"] = _taken(attacked)
    said = attacked.log.read_text(errors="replace")[before:]
    row["log_lines"], row["traces"] = said.count("\n"), said.count("Traceback")
    row["failures"] = dict(failures)
    return row


def _said(took: list[float]) -> str:
    if not took:
        return "none"
    return f"{len(took)}, p99 {np.quantile(took, 0.99) * 1e3:.0f} ms, longest {max(took) * 1e3:.0f} ms"


def _taken(site: Site) -> bool:
    """Whether another authority of the server is what a new connection sees in the end."""
    certificate, key = site.foreign.sign("localhost")
    for path, new in ((site.cert, certificate), (site.key, key)):
        _put(path, lambda p, new=new: p.write_bytes(new.read_bytes()))  # type: ignore[misc]
    shown = Credentials(True, site.foreign.ca, site.shown.certificate, site.shown.key)
    for _ in range(3):
        with (
            contextlib.suppress(ExpertdError),
            ExpertClient(site.server.address, credentials=shown, timeout_s=5) as client,
        ):
            client.forward(0, HIDDEN, IDS, WEIGHTS)
            return True
        time.sleep(0.5)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=", ".join(ATTACKS))
    parser.add_argument("--seconds", type=float, default=3.0, help="of each attack")
    parser.add_argument("--most-memory", type=int, default=64, metavar="MB")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    left = list(args.attacks or ATTACKS)
    while left:
        with tempfile.TemporaryDirectory() as folder, Sites(Path(folder)) as sites:
            while left:
                rows.append(run(left.pop(0), sites, args.seconds))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                if rows[-1]["failures"] or not rows[-1]["taken"]:
                    break  # the next one gets servers of its own
                sites["attacked"].renew()
    if args.json:
        print(json.dumps(rows))
    else:
        table = Table(show_lines=True)
        for column in rows[0]:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*map(str, row.values()))
        Console(width=180).print(table)
    return int(
        any(r["failures"] or not r["taken"] or r["traces"] or int(str(r["memory_mb"])) > args.most_memory for r in rows)
    )


if __name__ == "__main__":
    raise SystemExit(main())
