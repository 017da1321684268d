"""Every checkpoint fixture with one thing changed, loaded: refused by name, the same numbers, or a listed exception.

    python tests/faults/mutate.py [--fixtures DIR ...] [--only NAME] [--kinds remove,dtype] [--short] [--show excused]

Prints a table (kind of change by outcome), each change that ended in another way than it should, and what was excused
and why.  Exit code 1 if any change was accepted with other numbers, refused without naming its subject, or crashed.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from mutations import Mutation, Raw, config_mutations, tensor_mutations

from expertd_kernels.checkpoint import Checkpoint, CheckpointError, open_checkpoint

HERE = Path(__file__).resolve().parents[1]
FOLDERS = (HERE / "fixtures", HERE.parents[1] / "shared" / "fixtures")

EXCEPTIONS: tuple[tuple[str, str, str], ...] = (
    (r"swap ", "two tensors of one type and shape: nothing tells which numbers were meant to stand where"),
    (r"value .* \(first 0\)", "zero is a scale: groups that are padding, and experts that were never hit, have it"),
    (r"value .*(qzeros|weight_zero_point) ", "of asymmetric weights any zero point may be meant"),
    (
        r"dtype .*\.weight |dtype .*experts\.\w+_proj ",
        "an unquantized matrix says itself of which type it is; mixed ones are widened, with a note",
    ),
    (r"config .*: num_experts_per_tok ", "sizes warm-up and the choice of a backend; callers send their own routes"),
    (r"config .*: num_hidden_layers ", "layers beyond are taken for token prediction's and left alone, with a note"),
    (
        r"config .*: quantization_config\.(config_groups\.\w+\.input_activations|act_)",
        "tensors do not know how activations are to be rounded; what no kernel knows is not rounded, with a note",
    ),
    (r"config .*\.meta\b", "the tool's name is the only mark of gptqmodel's way to cut interleaved rows"),
    (r"config .*: swiglu_(alpha|limit) ", "constants of the activation stand in the configuration alone"),
)
"""(regular expression of a change, why it is accepted with other numbers): nothing in the files contradicts it."""

OUTCOMES = ("refused", "late", "same", "excused", "OTHER", "UNNAMED", "CRASH")


@dataclass(frozen=True)
class Verdict:
    """outcome: "refused" (by headers), "late" (refused when weights are read), "same" (numbers), "excused"; and what
    should not be: "OTHER" numbers, "UNNAMED" (an error that does not name its subject), "CRASH"."""

    mutation: Mutation
    outcome: str
    text: str = ""

    @property
    def wrong(self) -> bool:
        return self.outcome.isupper()


def judge(mutation: Mutation, raw: Raw, sound: str, folder: Path) -> Verdict:
    """Load the checkpoint with the change.  sound: answers() of the unchanged one."""
    changed = raw.copy()
    mutation.change(changed)
    changed.write(folder)
    stage = "refused"
    try:
        source = open_checkpoint(folder)
        for layer in source.layers:
            source.info(layer)
        stage = "late"
        found = answers(source)
    except CheckpointError as e:
        named = any(name in str(e) for name in mutation.names)
        return Verdict(mutation, stage if named else "UNNAMED", str(e))
    except Exception as e:
        return Verdict(mutation, "CRASH", f"{type(e).__name__}: {e}")
    if found == sound:
        return Verdict(mutation, "same")
    why = next((why for pattern, why in EXCEPTIONS if re.match(pattern, str(mutation))), "")
    return Verdict(mutation, "excused" if why else "OTHER", why)


def answers(source: Checkpoint) -> str:
    """A digest of all that decides an answer: the number of every weight, however it is stored."""
    digest = hashlib.sha256()
    for layer in source.layers:
        info, w = source.info(layer), source.load(layer)
        digest.update(repr((layer, info.top_k, w.activation, w.checkpoint_activation)).encode())
        for t in (w.w13.dequantize(), w.w2.dequantize(), w.w13.bias, w.w2.bias, w.input_scales):
            digest.update(b"none" if t is None else t.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def expert_tensors(source: Checkpoint) -> list[str]:
    found = {t.whole or t.name for layer in source.layers for t in source.needed(layer)}
    return sorted(found, key=lambda name: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", name)])


def spread(names: Sequence[str]) -> list[str]:
    """One tensor of each projection and suffix, of another expert each time."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[re.sub(r"\.\d+\.", ".*.", name)].append(name)
    return [group[(i + 1) % len(group)] for i, group in enumerate(groups.values())]


def mutations(raw: Raw, names: Sequence[str], kinds: Sequence[str], most: int | None) -> list[Mutation]:
    """The changes of one checkpoint: every tensor is taken away, one of each kind is changed otherwise.  most: of each
    kind, drawn at random but always alike."""
    tensors = [m for m in tensor_mutations(raw, names, names) if m.kind == "remove"]
    tensors += [m for m in tensor_mutations(raw, names, spread(names)) if m.kind != "remove"]
    by_kind: dict[str, list[Mutation]] = defaultdict(list)
    for m in [*tensors, *config_mutations(raw)]:
        by_kind[m.kind].append(m)
    out = []
    for kind in kinds:
        found = by_kind[kind]
        out += found if most is None or len(found) <= most else random.Random(0).sample(found, most)
    return out


def run(path: Path, kinds: Sequence[str], most: int | None, scratch: Path) -> Iterator[Verdict]:
    """The verdict on every change of the checkpoint at `path`.  scratch: a folder for the changed copies."""
    raw, folder = Raw.of(path), scratch / path.name
    folder.mkdir(parents=True, exist_ok=True)
    raw.write(folder)
    source = open_checkpoint(folder)
    sound, names = answers(source), expert_tensors(source)
    for m in mutations(raw, names, kinds, most):
        yield judge(m, raw, sound, folder)


KINDS = ("remove", "dtype", "shape", "swap", "value", "add", "config")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--fixtures", type=Path, nargs="*", default=FOLDERS)
    parser.add_argument("--only", default="", help="regular expression of fixtures' names")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--most", type=int, help="changes of each kind and fixture (default: all)")
    parser.add_argument("--show", default="OTHER,UNNAMED,CRASH", help="outcomes to print one by one")
    args = parser.parse_args(argv)
    folders = {p.parent.name: p.parent for base in args.fixtures for p in sorted(base.glob("*/config.json"))}
    torch.set_num_threads(1)
    total: dict[str, Counter[str]] = defaultdict(Counter)
    excused: Counter[str] = Counter()
    start, wrong = time.perf_counter(), 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as scratch:
        for name, path in folders.items():
            if not re.search(args.only, name):
                continue
            for v in run(path, args.kinds.split(","), args.most, Path(scratch)):
                total[v.mutation.kind][v.outcome] += 1
                excused.update([v.text] if v.outcome == "excused" else [])
                wrong += v.wrong
                if v.outcome in args.show.split(","):
                    print(f"{name}: {v.outcome}: {v.mutation}: {v.text}", flush=True)
    print(f"{'change':10}" + "".join(f"{o:>9}" for o in OUTCOMES))
    for kind, counts in total.items():
        print(f"{kind:10}" + "".join(f"{counts[o]:9}" for o in OUTCOMES))
    for why, count in excused.most_common():
        print(f"excused {count}: {why}")
    print(f"{sum(map(Counter.total, total.values()))} changes, {wrong} wrong, {time.perf_counter() - start:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
