"""Measures what served experts change in a model: perplexity of a text, and tasks of lm-eval, with the model's own
experts and with served ones.

    python client/examples/accuracy.py                         a tiny random model and a synthetic text, generated here
    python client/examples/accuracy.py --tasks synthetic       a synthetic task as well
    python client/examples/accuracy.py --checkpoint DIR --text wiki.txt --tasks arc_easy,gsm8k --limit 200
    python client/examples/accuracy.py --checkpoint DIR --servers 10.0.0.1:50051 --tasks gpqa_diamond_zeroshot
    python client/examples/accuracy.py --checkpoint DIR --only own --tasks gsm8k --json own.json     # first, and then:
    python client/examples/accuracy.py --checkpoint DIR --only served --servers A --tasks gsm8k --beside own.json

Both models get the same windows of text and the same documents.  The difference is taken for each window and each
document, so its interval is much narrower than those of the two scores.

Tasks need `pip install '.[evaluate]'` in a checkout (lm-eval); perplexity needs transformers alone.  Exit code 0: no
difference exceeds --allow at 95 % confidence; 1: one does; 2: a wrong command line.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import chat
import numpy as np
import torch
import transformers
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers

from expertd_client.transformers import load_without_experts

Scores = dict[str, list[float]]
"""Name of a measure -> one number for each window of text or document of a task."""

NLL = "nats a token"
CONFIDENCE = 1.96
"""Standard errors on either side of a mean: 95 % of a normal distribution."""
WORDS = 480
DOCUMENTS, CHOICES = 64, 4


# ---- measures --------------------------------------------------------------------------------------------------------


def windows_of(tokens: torch.Tensor, length: int) -> list[torch.Tensor]:
    """[1, length] pieces of [n] tokens, one after the other; the rest is left out."""
    return [tokens[None, at : at + length] for at in range(0, tokens.numel() - length + 1, length)]


@torch.inference_mode()
def likelihoods(model: Any, windows: Sequence[torch.Tensor]) -> list[float]:
    """Mean negative log-likelihood of each window's tokens but the first, in nats."""
    out = []
    for window in windows:
        ids = window.to(model.device)
        logits = model(input_ids=ids).logits[0, :-1].float()
        out.append(float(torch.nn.functional.cross_entropy(logits, ids[0, 1:])))
    return out


def task_scores(model: Any, tokenizer: Any, args: argparse.Namespace) -> Scores:
    """lm-eval's metrics of each document, by "task metric"."""
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as e:
        raise SystemExit(f"accuracy: --tasks needs lm-eval ({e}): pip install '.[evaluate]' in a checkout") from None
    found = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=args.batch_size),
        tasks=args.tasks.split(","),
        task_manager=TaskManager(include_path=args.task_folder),
        limit=args.limit,
        log_samples=True,
        bootstrap_iters=0,
    )
    scores: Scores = {}
    for task, samples in found["samples"].items():
        for sample in sorted(samples, key=lambda s: s["doc_id"]):
            for metric in sample["metrics"]:
                if isinstance(sample[metric], int | float):  # a metric of the whole task has no value for one document
                    scores.setdefault(f"{task} {metric}", []).append(float(sample[metric]))
    return scores


def measure(model: Any, tokenizer: Any, args: argparse.Namespace) -> Scores:
    """Perplexity of the text and the tasks, as far as the command line asks for them."""
    scores: Scores = {}
    if args.text:
        text = args.text.read_text()
        tokens = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
        windows = windows_of(tokens, args.window)
        if len(windows) < 2:
            raise SystemExit(f"accuracy: {args.text} has {tokens.numel()} tokens, want two windows of {args.window}")
        scores[NLL] = likelihoods(model, windows[: args.limit])
    if args.tasks:
        scores |= task_scores(model, tokenizer, args)
    return scores


# ---- the report ------------------------------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half of its 95 % interval); NaN if a value is NaN."""
    numbers = np.array(values, np.float64)
    half = CONFIDENCE * numbers.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return float(numbers.mean()), float(half)


def within(own: Sequence[float], served: Sequence[float], allow: float) -> bool:
    """Whether the interval of the mean difference reaches into -allow to allow; one value has no interval."""
    mean, half = interval([b - a for a, b in zip(own, served, strict=True)])
    return abs(mean) - (half if len(own) > 1 else 0.0) <= allow


def table_of(own: Scores, served: Scores) -> Table:
    table = Table(title="the model with its own experts and with served ones; +-: 95 % confidence")
    for column in ("measure", "n", "own", "served", "served - own", "equal"):
        table.add_column(column, justify="left" if column == "measure" else "right")
    for name, before in own.items():
        after = served[name]
        differences = [b - a for a, b in zip(before, after, strict=True)]
        equal = sum(d == 0 for d in differences)
        cells = [_spread(*interval(values)) for values in (before, after, differences)]
        table.add_row(name, str(len(before)), *cells, f"{equal / len(before):.0%}")
        if name == NLL:
            table.add_row("perplexity", "", *(f"{math.exp(interval(v)[0]):.4f}" for v in (before, after)), "", "")
    return table


def _spread(mean: float, half: float) -> str:
    digits = 4 if mean == 0 or abs(mean) >= 1e-3 else 7
    return f"{mean:.{digits}f} +- {half:.{digits}f}"


def verdict(own: Scores, served: Scores, allow: float) -> int:
    if {n: len(v) for n, v in own.items()} != {n: len(v) for n, v in served.items()}:
        raise SystemExit(f"accuracy: own has {list(own)}, served {list(served)}: the options differ")
    chat.console.print(table_of(own, served))
    beyond = [name for name in own if not within(own[name], served[name], allow)]
    for name in beyond:
        chat.console.print(f"{name}: the difference is more than {allow:g} at 95 % confidence")
    return 1 if beyond else 0


# ---- models ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def servers_of(args: argparse.Namespace) -> Iterator[list[str]]:
    if args.servers:
        yield args.servers
        return
    options = ("--device", "cpu", "--threads", "1", "--compute-dtype", "float32") if args.tiny else ()
    with chat.two_servers(args.checkpoint, *options) as addresses:
        yield addresses


def scores_of(args: argparse.Namespace, tokenizer: Any) -> dict[str, Scores]:
    """Scores of "own" and "served", or of the one that --only names; one model is in memory at a time."""
    out = {}
    options = {"dtype": torch.float32} if args.tiny else {"dtype": "auto", "device_map": args.device_map}
    if args.only != "served":
        model = own_model(args, options)
        out["own"] = measure(model.eval(), tokenizer, args)
        del model
        gc.collect()
    if args.only != "own":
        with servers_of(args) as servers:
            model = load_without_experts(args.checkpoint, servers[0] if len(servers) == 1 else servers, **options)
            out["served"] = measure(model.eval(), tokenizer, args)
    return out


def own_model(args: argparse.Namespace, options: Mapping[str, Any]) -> Any:
    """The model with its own experts.  Those of the tiny model are set to the dequantized weights that are served."""
    model = transformers.AutoModelForCausalLM.from_pretrained(args.tiny or args.checkpoint, **options)
    if args.tiny:
        chat.dequantize_into(model, args.checkpoint)
    return model


# ---- the tiny model --------------------------------------------------------------------------------------------------


def synthetic(args: argparse.Namespace, folder: Path) -> Any:
    """Generates a tiny random model, its quantized checkpoint, a text and a task; returns the tokenizer."""
    args.tiny, args.checkpoint = folder / "whole", folder / "quantized"
    chat.make(args.family, args.tiny)
    scheme = "mxfp4" if args.family == "gpt_oss" else "int4_g32"
    command = chat.expertd("quantize", str(args.tiny), str(args.checkpoint), "--scheme", scheme)
    subprocess.run(command, check=True, capture_output=True)
    words = [f"w{n}" for n in range(WORDS)]
    draw = random.Random(1)
    args.text = args.text or folder / "text.txt"
    if not args.text.exists():
        args.text.write_text(
            " ".join(draw.choices(words, weights=[1 / (n + 1) for n in range(WORDS)], k=16 * args.window))
        )
    if args.tasks == "synthetic":
        args.task_folder = _task(folder, draw, words)
    return tokenizer_of(words)


def _task(folder: Path, draw: random.Random, words: Sequence[str]) -> str:
    """A folder with a task: questions with four answers of random words.  The right one is random, too: a model gets
    about a quarter right."""
    place = folder / "tasks"
    place.mkdir()
    documents = [
        {
            "question": " ".join(draw.choices(words, k=12)),
            "choices": [" ".join(draw.choices(words, k=3)) for _ in range(CHOICES)],
            "answer": draw.randrange(CHOICES),
        }
        for _ in range(DOCUMENTS)
    ]
    (place / "synthetic.jsonl").write_text("".join(json.dumps(d) + "\n" for d in documents))
    (place / "synthetic.yaml").write_text(
        "task: synthetic\n"
        "dataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: '{place / 'synthetic.jsonl'}'}}, cache_dir: '{folder / 'cache'}'}}\n"
        "test_split: test\n"
        "output_type: multiple_choice\n"
        'doc_to_text: "{{question}}"\n'
        'doc_to_choice: "{{choices}}"\n'
        'doc_to_target: "{{answer}}"\n'
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    return str(place)


def tokenizer_of(words: Sequence[str]) -> Any:
    """One token for each word, from 3 on; 0 is padding, 1 begins and ends, 2 is any other word."""
    vocabulary = {"<pad>": 0, "<s>": 1, "<unk>": 2, **{w: n + 3 for n, w in enumerate(words)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="<s>", unk_token="<unk>"
    )


# ---- the command -----------------------------------------------------------------------------------------------------


def arguments_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="a real model; default: a tiny random one")
    parser.add_argument("--family", default="qwen3_moe", choices=chat.FAMILIES, help="family of the tiny model")
    parser.add_argument("--servers", nargs="+", metavar="HOST:PORT", help="its servers; default: two are started here")
    parser.add_argument("--text", type=Path, metavar="FILE", help="measure this text's perplexity")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window (default: 512)")
    parser.add_argument("--tasks", default="", metavar="A,B", help="tasks of lm-eval; the tiny model has `synthetic`")
    parser.add_argument("--task-folder", metavar="DIR", help="further tasks, as YAML files")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N windows, and documents of each task")
    parser.add_argument("--batch-size", type=int, default=8, help="of tasks (default: 8)")
    parser.add_argument("--device-map", default="auto", help="of transformers, for both models (default: auto)")
    parser.add_argument("--only", choices=("own", "served"), help="measure one; --beside has the other one")
    parser.add_argument("--beside", type=Path, metavar="FILE", help="scores that --json wrote")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the scores")
    parser.add_argument("--allow", type=float, default=1e-3, help="largest difference (default: 0.001)")
    args = parser.parse_args(arguments)
    args.tiny = None
    if args.checkpoint is None and (args.only or args.servers):
        parser.error("--only and --servers are for a --checkpoint")
    if args.checkpoint is not None and not (args.text or args.tasks):
        parser.error("a --checkpoint needs --text or --tasks")
    if bool(args.beside) and not args.only:
        parser.error("--beside needs --only")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = arguments_of(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        if args.checkpoint is None:
            tokenizer = synthetic(args, Path(folder))
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(args.checkpoint)
        found: dict[str, Scores] = scores_of(args, tokenizer)
    if args.json:
        args.json.write_text(json.dumps(found))
    if args.beside:
        other: Mapping[str, Scores] = json.loads(args.beside.read_text())
        found = {**other, **found}
    if len(found) < 2:
        for name, values in next(iter(found.values())).items():
            chat.console.print(f"{name}: {_spread(*interval(values))} ({len(values)})")
        return 0
    return verdict(found["own"], found["served"], args.allow)


if __name__ == "__main__":
    sys.exit(main())
