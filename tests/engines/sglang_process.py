"""An SGLang engine in a process of its own, on a CPU: `python sglang_process.py JSON` prints one line of JSON: tokens.

The JSON: checkpoint, prompts (token ids), new_tokens, and more arguments of sglang.Engine under "options"."""

from __future__ import annotations

import json
import os
import sys

import sglang_cpu_ops

sglang_cpu_ops.stand_ins()  # here, because each process that SGLang spawns imports this file first


def main() -> None:
    import sglang

    given = json.loads(sys.argv[1])
    options = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "mem_fraction_static": 0.1,
        "max_total_tokens": 512,
        "log_level": "warning",
        "cuda_graph_backend_decode": "disabled",
        "cuda_graph_backend_prefill": "disabled",
    }
    engine = sglang.Engine(model_path=given["checkpoint"], **{**options, **given.get("options", {})})
    sampling = {"temperature": 0, "max_new_tokens": given["new_tokens"], "ignore_eos": True}
    answers = engine.generate(input_ids=given["prompts"], sampling_params=sampling)
    print("\n@" + json.dumps({"tokens": [answer["output_ids"] for answer in answers]}), flush=True)
    engine.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
