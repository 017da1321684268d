"""One inference engine of many_engines.py: a tiny model in a process of its own whose experts servers compute.

It generates greedy tokens for its prompts in turn, compares them, and the last state or logits, with what the same
model gives with its experts in this process, and appends a line of JSON to its file for every generation: when it
began, whether it was equal, when each call began (seconds of time.monotonic) and how long it took (us), or the error.

Kinds: "numpy" (a decoder of a few lines, ExpertClient or ExpertCluster), "torch" (the same decoder through
RemoteExperts), "transformers" (a qwen3_moe through load_without_experts).
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from expertd.errors import ExpertdError
from expertd_client import Credentials, ExpertClient, ExpertCluster, RemoteExperts
from expertd_client.clients.forwarder import Forwarder
from expertd_client.transformers import load_without_experts
from expertd_kernels.checkpoint import open_checkpoint

__all__ = ["KINDS", "Engine", "flood", "run"]

KINDS = ("numpy", "torch", "transformers")
PROMPTS, TOKENS = 4, 16
MARGIN = 1e-3
"""Least distance, in the float32 model, between the best and the second best token, and between the last expert that is
chosen and the first that is not.  A prompt that comes nearer is not used: there rounding may choose."""
NEAR = 1e-4
"""Of ||out - ref|| / ||ref|| after a generation; float32 and the order of sums give some 1e-6."""
Experts = Callable[[int, Any, Any, Any], Any]
"""(layer, x [M, H] f32, ids [M, top_k], weights [M, top_k]) -> [M, H]."""


@dataclass(frozen=True)
class Engine:
    """name: its identity; addresses: one server or several; checkpoint: a folder; batch: sequences at once; pause_s:
    between two steps; out: its file."""

    name: str
    kind: str
    addresses: tuple[str, ...]
    token_file: Path
    checkpoint: Path
    seed: int
    batch: int
    pause_s: float
    out: Path
    timeout_s: float = 60.0

    def forwarder(self) -> Forwarder:
        more: Any = {"timeout_s": self.timeout_s, "credentials": Credentials(token_file=self.token_file)}
        if len(self.addresses) > 1:
            return ExpertCluster(self.addresses, **more)
        return ExpertClient(self.addresses[0], **more)


class Decoder:
    """A recurrent decoder with an MoE block in each layer; float32.

    h [B, H] -> tanh(h A + embedding), then for each layer x + experts(x) scaled to unit mean square, then the head."""

    VOCABULARY = 61

    def __init__(self, seed: int, hidden: int, layers: int, experts: int, top_k: int) -> None:
        rng = np.random.default_rng(seed)

        def drawn(*shape: int, scale: float = 1.0) -> Any:
            return (scale * rng.standard_normal(shape)).astype(np.float32)

        self.embedding, self.head = drawn(self.VOCABULARY, hidden), drawn(self.VOCABULARY, hidden)
        self.mix = drawn(hidden, hidden, scale=hidden**-0.5)
        self.routers = [drawn(experts, hidden, scale=hidden**-0.5) for _ in range(layers)]
        self.top_k = top_k

    def generate(
        self, prompts: Any, tokens: int, experts: Experts, step: Callable[[], object]
    ) -> tuple[Any, float, Any]:
        """prompts [B, S]; step() is called before each step.  ([B, tokens], the least margin, the last h [B, H])."""
        h = np.zeros((len(prompts), self.mix.shape[0]), np.float32)
        said, least, last = [], np.inf, prompts[:, 0]
        for n in range(prompts.shape[1] + tokens - 1):
            step()
            last = prompts[:, n] if n < prompts.shape[1] else last
            h = np.tanh(h @ self.mix + self.embedding[last])
            for layer, router in enumerate(self.routers):
                scores = h @ router.T
                order = np.argsort(-scores, axis=1, kind="stable")
                ids = order[:, : self.top_k].astype(np.int32)
                sorted_scores = np.take_along_axis(scores, order, 1)
                least = min(least, float((sorted_scores[:, self.top_k - 1] - sorted_scores[:, self.top_k]).min()))
                chosen = np.exp(sorted_scores[:, : self.top_k] - sorted_scores[:, :1])
                weights = (chosen / chosen.sum(1, keepdims=True)).astype(np.float32)
                h = h + experts(layer, h, ids, weights)
                h = h / np.sqrt((h * h).mean(1, keepdims=True))
            if n >= prompts.shape[1] - 1:
                logits = np.sort(h @ self.head.T, axis=1)
                least = min(least, float((logits[:, -1] - logits[:, -2]).min()))
                last = (h @ self.head.T).argmax(1)
                said.append(last)
        return np.stack(said, 1), least, h


def equal(said: Any, last: Any, expected: Any, expected_last: Any) -> bool:
    """The same tokens, and the same last state or logits but for rounding."""
    error = np.linalg.norm(last - expected_last) / np.linalg.norm(expected_last)
    return bool((said == expected).all() and error <= NEAR)


def local_experts(checkpoint: Path) -> Experts:
    """The experts of a checkpoint, in numpy."""
    source = open_checkpoint(checkpoint)
    weights = [source.load(layer) for layer in source.layers]
    matrices = [(w.w13.dequantize().numpy(), w.w2.dequantize().numpy()) for w in weights]

    def compute(layer: int, x: Any, ids: Any, weights: Any) -> Any:
        w13, w2 = matrices[layer]
        out = np.zeros_like(x)
        for token, slot in itertools.product(range(len(x)), range(ids.shape[1])):
            gate, up = np.split(w13[ids[token, slot]] @ x[token], 2)
            out[token] += weights[token, slot] * (w2[ids[token, slot]] @ (gate / (1 + np.exp(-gate)) * up))
        return out

    return compute


class DecoderEngine:
    """The decoder with its experts at servers.  torch: through RemoteExperts."""

    def __init__(self, engine: Engine, forwarder: Forwarder) -> None:
        source = open_checkpoint(engine.checkpoint)
        layers, w = list(source.layers), source.load(0)
        self._decoder = Decoder(engine.seed, w.hidden_size, len(layers), w.num_experts, top_k=2)
        remote = [RemoteExperts(forwarder, layer).eval() for layer in layers]

        def by_torch(layer: int, x: Any, ids: Any, weights: Any) -> Any:
            return remote[layer](*(torch.from_numpy(a) for a in (x, ids, weights))).numpy()

        def by_numpy(layer: int, x: Any, ids: Any, weights: Any) -> Any:
            answer = forwarder.forward(layer, x, ids, weights)
            output = np.array(answer.output)  # what is lent goes back
            answer.release()
            return output

        self._remote: Experts = by_torch if engine.kind == "torch" else by_numpy
        self.prompts, self.expected = self._chosen(engine, local_experts(engine.checkpoint))

    def _chosen(self, engine: Engine, experts: Experts) -> tuple[list[Any], list[Any]]:
        """Prompts with a margin, and what follows them with the experts in this process."""
        rng, prompts, expected = np.random.default_rng(engine.seed + 1), [], []
        while len(prompts) < PROMPTS:
            prompt = rng.integers(0, Decoder.VOCABULARY, (engine.batch, 3))
            said, margin, last = self._decoder.generate(prompt, TOKENS, experts, lambda: None)
            if margin >= MARGIN:
                prompts.append(prompt)
                expected.append((said, last))
        return prompts, expected

    def generate(self, n: int, step: Callable[[], object]) -> bool:
        said, _, last = self._decoder.generate(self.prompts[n], TOKENS, self._remote, step)
        return equal(said, last, *self.expected[n])


class TransformersEngine:
    """A model of transformers, loaded without its experts, beside the whole one."""

    def __init__(self, engine: Engine, forwarder: Forwarder) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        whole = transformers.AutoModelForCausalLM.from_pretrained(engine.checkpoint, dtype=torch.float32).eval()
        self._model = load_without_experts(engine.checkpoint, forwarder, dtype=torch.float32).eval()
        generator = torch.Generator().manual_seed(engine.seed)
        self.prompts, self.expected = [], []
        while len(self.prompts) < PROMPTS:
            prompt = torch.randint(2, whole.config.vocab_size, (engine.batch, 5), generator=generator)
            said, margin, last = self._speak(whole, prompt, lambda: None)
            if margin >= MARGIN / 10:  # logits of this model are a tenth of the decoder's
                self.prompts.append(prompt)
                self.expected.append((said, last))

    def _speak(self, model: Any, prompt: Any, step: Callable[[], object]) -> tuple[Any, float, Any]:
        cache, least, tokens, said = None, np.inf, prompt, []
        with torch.inference_mode():
            for _ in range(TOKENS):
                step()
                out = model(input_ids=tokens, past_key_values=cache, use_cache=True, output_router_logits=True)
                best = out.logits[:, -1].topk(2).values
                least = min(least, float((best[:, 0] - best[:, 1]).min()))
                k = model.config.num_experts_per_tok
                for scores in out.router_logits:
                    near = scores.topk(k + 1).values
                    least = min(least, float((near[:, k - 1] - near[:, k]).min()))
                cache, tokens = out.past_key_values, out.logits[:, -1:].argmax(-1)
                said.append(tokens)
        return torch.cat(said, 1).numpy(), least, out.logits[:, -1].numpy()

    def generate(self, n: int, step: Callable[[], object]) -> bool:
        said, _, last = self._speak(self._model, self.prompts[n], step)
        return equal(said, last, *self.expected[n])


class Calls:
    """When each call of a forwarder began, s, and how long it took, us."""

    def __init__(self, forwarder: Any) -> None:
        self.times: list[tuple[float, int]] = []
        call = forwarder.forward_request

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin_s = time.monotonic()
            answer = call(*args, **kwargs)
            self.times.append((round(begin_s, 4), round(1e6 * (time.monotonic() - begin_s))))
            return answer

        forwarder.forward_request = timed


def run(engine: Engine) -> None:
    """Until SIGTERM.  The body of a process."""
    leaving = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leaving.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the script, which ends this process
    torch.set_num_threads(1)
    with engine.forwarder() as forwarder, engine.out.open("a", buffering=1) as out:
        kind = TransformersEngine if engine.kind == "transformers" else DecoderEngine
        model = kind(engine, forwarder)
        calls = Calls(forwarder)

        def step() -> None:
            leaving.wait(engine.pause_s)

        out.write(json.dumps({"pid": os.getpid(), "began": time.monotonic()}) + "\n")
        for n in itertools.cycle(range(PROMPTS)):
            begin_s, calls.times = time.monotonic(), []
            line: dict[str, Any] = {"began": begin_s, "tokens": engine.batch * TOKENS}
            try:
                line["equal"] = model.generate(n, step)
            except ExpertdError as error:
                line["error"] = error.reason
            out.write(json.dumps({**line, "calls": calls.times}) + "\n")
            if leaving.is_set():
                return


def flood(engine: Engine, address: str, in_flight: int, tokens: int) -> None:
    """Keeps so many requests of so many tokens under way at one server, until SIGTERM; writes a line when the first is
    answered, and in the end how many were.  The body of a process."""
    leaving = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leaving.set())
    rng, hidden = np.random.default_rng(0), open_checkpoint(engine.checkpoint).load(0).hidden_size
    x = rng.standard_normal((tokens, hidden), np.float32)
    ids = np.stack([rng.permutation(8)[:2] for _ in range(tokens)]).astype(np.int32)
    weights = np.full((tokens, 2), 0.5, np.float32)
    done = itertools.count()
    with ExpertClient(address, timeout_s=60.0, credentials=Credentials(token_file=engine.token_file)) as client:

        def ask() -> None:
            while not leaving.is_set():
                try:
                    client.forward(0, x, ids, weights).release()
                    next(done)
                except ExpertdError:
                    leaving.wait(0.01)

        client.forward(0, x, ids, weights).release()
        engine.out.write_text(json.dumps({"flooding": True}) + "\n")
        threads = [threading.Thread(target=ask, daemon=True) for _ in range(in_flight)]
        for thread in threads:
            thread.start()
        leaving.wait()
        for thread in threads:
            thread.join(60)
    with engine.out.open("a") as out:
        out.write(json.dumps({"flooded": next(done)}) + "\n")
