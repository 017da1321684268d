"""A small reinforcement-learning loop: a trainer publishes new experts while rollouts go on, without a pause.

    python client/examples/rl_loop.py                       8 steps; server 1 is killed in the middle of an update
    python client/examples/rl_loop.py --steps 20 --scheme int8 --no-kill

Two `expertd serve` hold one half of the experts each of a tiny random transformers model.  Each step the trainer takes
the episodes that have come, changes its experts by their rewards (tokens below half of the vocabulary are good), and
publishes them as the next version.  Meanwhile a thread of rollouts samples episodes: each names the version that it
began with, so that one policy said all of its tokens; where that version is held no more, the episode is given up.

At the end greedy tokens of every version, as the servers said them while they served it, are compared with those of the
model with the same weights, quantized in the same way, in this process.  Exit code 0 = they are equal, no call failed,
and every answer was of the version that it was asked for.
"""

from __future__ import annotations

import argparse
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chat
import torch
import transformers
from rich.table import Table

from expertd.errors import WeightsVersionNotHeldError
from expertd_client import ExpertCluster, Request
from expertd_client.clients.forwarder import Forwarder
from expertd_client.requests.result import ForwardResult
from expertd_client.transformers import load_without_experts
from expertd_client.weights import UpdateFailedError, Updater, expert_tensors
from expertd_kernels.checkpoint import open_checkpoint
from expertd_kernels.sources.quantized import QuantizedSource
from expertd_kernels.weights.quantize import scheme_named

FAMILY = "qwen3_moe"
VOCABULARY = int(chat.SIZES["vocab_size"])
PROMPT = torch.randint(2, VOCABULARY, (1, 8), generator=torch.Generator().manual_seed(1))
CALL_S = 60.0
"""Of a call while a server is being started again."""


class Pinned(Forwarder):
    """A cluster whose calls ask for one version of the weights; wrong: answers of another one."""

    def __init__(self, cluster: ExpertCluster) -> None:
        self._cluster, self.version, self.calls, self.wrong = cluster, 0, 0, 0

    def forward_request(self, request: Request, *, timeout_s: float | None = None) -> ForwardResult:
        answer = self._cluster.forward_request(request.pinned(self.version), timeout_s=timeout_s or CALL_S)
        self.calls += 1
        self.wrong += answer.weights_version != self.version
        return answer

    def submit_request(self, request: Request, *, timeout_s: float | None = None) -> Future[ForwardResult]:
        return self._cluster.submit_request(request.pinned(self.version), timeout_s=timeout_s or CALL_S)

    def close(self) -> None:
        self._cluster.close()


class Server:
    """`expertd serve` of one half of the experts, which can be killed and started again at the same address."""

    def __init__(self, folder: Path, half: int, scheme: str, held: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self._command = chat.expertd(
            "serve", "--checkpoint", str(folder), "--shard", f"{half}/2", "--quantize", scheme,
            "--listen", self.address, "--admin-listen", "127.0.0.1:0", "--held", str(held),
            "--compute-dtype", "float32", "--device", "cpu", "--threads", "1",
        )  # fmt: skip
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def ready(self) -> None:
        chat.address_of(self._process)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@dataclass
class Episode:
    """What was said by one version: tokens [n]."""

    version: int
    tokens: list[int]

    @property
    def reward(self) -> float:
        return sum(t < VOCABULARY // 2 for t in self.tokens) / len(self.tokens)


@dataclass
class Rollouts:
    """A thread that samples episodes with the newest version, until stop.  spoken: greedy tokens by version."""

    model: Any
    forwarder: Pinned
    length: int
    newest: int = 1
    episodes: list[Episode] = field(default_factory=list)
    spoken: dict[int, list[int]] = field(default_factory=dict)
    given_up: int = 0
    failed: list[BaseException] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        generator = torch.Generator().manual_seed(3)
        while not self.stop.is_set():
            version = self.forwarder.version = self.newest
            try:
                if version not in self.spoken:
                    self.spoken[version] = list(said(self.model, self.length, None))
                episode = Episode(version, list(said(self.model, self.length, generator)))
            except WeightsVersionNotHeldError:
                self.given_up += 1
                continue
            except BaseException as error:
                self.failed.append(error)
                return
            with self.lock:
                self.episodes.append(episode)

    def take(self, least: int) -> list[Episode]:
        """Those that have come, at least so many."""
        while not self.failed:
            with self.lock:
                if len(self.episodes) >= least:
                    out, self.episodes = self.episodes, []
                    return out
            time.sleep(0.02)
        raise SystemExit(f"rl_loop: a rollout failed: {self.failed[0]!r}")


def said(model: Any, length: int, generator: torch.Generator | None) -> Iterator[int]:
    """Tokens after PROMPT: sampled, or greedy without a generator."""
    cache, step = None, PROMPT
    for _ in range(length):
        with torch.inference_mode():
            out = model(input_ids=step, past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[:, -1]
        if generator is None:
            step = logits.argmax(-1, keepdim=True)
        else:
            step = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        yield int(step)


def train(model: Any, episodes: Sequence[Episode], rate: float) -> float:
    """One step of REINFORCE on the experts alone; the mean reward."""
    rewards = torch.tensor([e.reward for e in episodes])
    tokens = torch.tensor([e.tokens for e in episodes])
    whole = torch.cat([PROMPT.expand(len(episodes), -1), tokens], 1)
    logits = model(input_ids=whole[:, :-1]).logits[:, PROMPT.shape[1] - 1 :]
    logp = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1).sum(1)
    loss = -((rewards - rewards.mean()) * logp).mean() - 0.01 * (rewards * logp).mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= rate * parameter.grad / (parameter.grad.norm() + 1e-6)
                parameter.grad = None
    return float(rewards.mean())


def expected(model: Any, folder: Path, scheme: str, length: int) -> list[int]:
    """Greedy tokens of the model in this process with a version's weights, quantized as the servers do that."""
    source = QuantizedSource(open_checkpoint(folder), scheme_named(scheme))
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            weights = source.load(int(re.findall(r"\.(\d+)\.", name)[-1]))
            with torch.no_grad():
                module.gate_up_proj.copy_(weights.w13.dequantize())
                module.down_proj.copy_(weights.w2.dequantize())
    return list(said(model, length, None))


class Loop:
    """Trainer, servers and rollouts.  kill_at: the step in whose update a server is killed; 0 = none."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args, self._folder = args, folder
        chat.make(FAMILY, folder / "1")
        self.kill_at = 0 if args.no_kill else 1 + args.steps // 2
        self._servers = [Server(folder / "1", n, args.scheme, folder / f"held-{n}.json") for n in range(2)]
        self.rows: list[tuple[str, ...]] = []

    def close(self) -> None:
        for server in self._servers:
            server.kill()

    def run(self) -> Rollouts:
        """All steps."""
        args = self._args
        for server in self._servers:
            server.ready()
        trained = transformers.AutoModelForCausalLM.from_pretrained(self._folder / "1", dtype=torch.float32)
        for name, parameter in trained.named_parameters():
            parameter.requires_grad_(".experts." in name)
        addresses = [server.address for server in self._servers]
        with ExpertCluster(addresses, timeout_s=CALL_S) as cluster, Updater(addresses) as updater:
            forwarder = Pinned(cluster)
            model = load_without_experts(self._folder / "1", forwarder, dtype=torch.float32)
            rollouts = Rollouts(model, forwarder, args.tokens)
            thread = threading.Thread(target=rollouts.run, name="rollouts")
            thread.start()
            try:
                for step in range(1, args.steps + 1):
                    self._step(step, trained, rollouts, updater)
                while rollouts.newest not in rollouts.spoken:
                    rollouts.take(1)
            finally:
                rollouts.stop.set()
                thread.join()
        return rollouts

    def _step(self, step: int, trained: Any, rollouts: Rollouts, updater: Updater) -> None:
        episodes = rollouts.take(self._args.episodes)
        while rollouts.newest not in rollouts.spoken:  # its greedy tokens are needed at the end
            episodes += rollouts.take(1)
        reward = train(trained, episodes, self._args.rate)
        number = rollouts.newest + 1
        trained.save_pretrained(self._folder / str(number))
        begin, tries = time.perf_counter(), 0
        while True:
            tries += 1
            try:
                with updater.version(number, label=f"step {step}") as update:
                    update.put_all(expert_tensors(trained))
                    if step == self.kill_at and tries == 1:
                        self._servers[1].kill()  # it has half of the experts of an update that is not committed
                        self._servers[1].start()
                break
            except UpdateFailedError as error:
                if tries > 3:
                    raise
                chat.console.print(f"step {step}: {str(error)[:100]}: again", soft_wrap=True)
                self._servers[1].ready()
        rollouts.newest = number
        seconds = time.perf_counter() - begin
        sources = ", ".join(map(str, sorted({e.version for e in episodes})))
        self.rows.append((str(step), str(number), str(len(episodes)), sources, f"{reward:.3f}", f"{seconds:.2f}"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=8, help="updates (8)")
    parser.add_argument("--episodes", type=int, default=4, help="of a step, at least (4)")
    parser.add_argument("--tokens", type=int, default=16, help="of an episode (16)")
    parser.add_argument("--scheme", default="int4_g32", help="how experts are quantized (int4_g32)")
    parser.add_argument("--rate", type=float, default=0.5, help="length of a step (0.5)")
    parser.add_argument("--no-kill", action="store_true", help="kill no server")
    args = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        loop = Loop(args, folder)
        try:
            rollouts = loop.run()
        finally:
            loop.close()
        local = transformers.AutoModelForCausalLM.from_pretrained(folder / "1", dtype=torch.float32)
        different = [
            version
            for version, tokens in sorted(rollouts.spoken.items())
            if tokens != expected(local, folder / str(version), args.scheme, args.tokens)
        ]
    table = Table(title="a trainer publishes, rollouts go on")
    for column in ("step", "version", "episodes", "of versions", "reward", "update s"):
        table.add_column(column, justify="right")
    for row in loop.rows:
        table.add_row(*row)
    chat.console.print(table)
    spoken = [tuple(tokens) for tokens in rollouts.spoken.values()]
    chat.console.print(
        f"greedy tokens of {len(spoken) - len(different)} of {len(spoken)} versions equal the local model's"
        f" ({len(set(spoken))} are different ones); {rollouts.forwarder.calls} calls, {len(rollouts.failed)} failed,"
        f" {rollouts.forwarder.wrong} of another version than asked for, {rollouts.given_up} episodes given up",
        soft_wrap=True,
    )
    return 0 if not (different or rollouts.failed or rollouts.forwarder.wrong) else 1


if __name__ == "__main__":
    sys.exit(main())
