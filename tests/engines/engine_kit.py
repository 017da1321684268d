"""What the tests of both engines share: tiny models as checkpoints, plugins where an engine finds them, scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from tiny_models import save, tiny_model

from expertd_client.engines.strip import strip

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PROMPTS = [[3, 7, 11, 20, 33], list(range(5, 45)), [90]]
NEW_TOKENS = 24
LIMIT_S = 220


def plugins(folder, group, *more):
    """A folder in which an engine finds our plugin, by the entry point of pyproject.toml, and others."""
    text = (ROOT / "pyproject.toml").read_text()
    ours = text.split(f'[project.entry-points."{group}"]\n')[1].splitlines()[0].replace('"', "")
    described = folder / "expertd_tests-0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: expertd-tests\nVersion: 0\n")
    (described / "entry_points.txt").write_text("\n".join([f"[{group}]", ours, *more]) + "\n")
    return folder


class Models:
    """Name -> (model, whole checkpoint, checkpoint without experts); made when asked for."""

    def __init__(self, tmp_path_factory):
        self._made, self._tmp_path_factory = {}, tmp_path_factory

    def __call__(self, name):
        if name not in self._made:
            folder = self._tmp_path_factory.mktemp(name)
            model = tiny_model(name, head_dim=32, hidden_size=128)
            save(model, folder / "whole")
            strip(folder / "whole", folder / "front")
            self._made[name] = model, folder / "whole", folder / "front"
        return self._made[name]


def script(name, *arguments, path=(), **environ):
    """What a script of this folder prints behind an @, as JSON."""
    paths = os.pathsep.join([*map(str, path), str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environ}
    command = [sys.executable, str(HERE / name), *arguments]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    said = ran.stdout.rpartition("\n@")[2]
    assert said.startswith("{"), ran.stderr[-4000:]
    return json.loads(said)


def engine(name, folder, checkpoint, address, options, **environ):
    """What an engine's process prints.  folder: of plugins()."""
    given = {"checkpoint": str(checkpoint), "prompts": PROMPTS, "new_tokens": NEW_TOKENS, "options": options}
    return script(name, json.dumps(given), path=[folder], EXPERTD_ADDRESS=address, **environ)


def greedy(model):
    """What transformers says."""
    with torch.inference_mode():
        found = []
        for prompt in PROMPTS:
            whole = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
            found.append(whole[0, len(prompt) :].tolist())
    return found
