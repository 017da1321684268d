"""A vLLM engine in a process of its own, on a CPU: `python vllm_process.py JSON` prints one line of JSON.

The JSON: checkpoint, prompts (token ids), new_tokens, and more arguments of vllm.LLM under "options".  Prints what the
engine generated, and what each of its ranks sent and to which end: calls, tokens, steps, dummy steps, the order of
events, and the classes that stand in its model."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from typing import Any

os.environ |= {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "HF_HUB_OFFLINE": "1",
}


def counted(call: Any, seen: Counter[str], events: list[str]) -> Any:
    """A forwarder's method that counts."""

    def sent(request: Any, *args: Any, **kwargs: Any) -> Any:
        seen["calls"] += 1
        seen["tokens"] += len(request.topk_ids)
        events.append("sent")
        return call(request, *args, **kwargs)

    return sent


def watch(worker: Any) -> None:
    """Counts from now on, in this rank: what its layers send and compute, by wrapping their objects."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    seen = worker.seen = Counter()
    worker.events = []
    runners = [m for m in worker.model_runner.model.modules() if isinstance(m, MoERunner)]
    forwarders = {m.routed_experts.quant_method.experts.remote.forwarder for m in runners}
    for forwarder in forwarders:
        for name in ("forward_request", "submit_request"):
            setattr(forwarder, name, counted(getattr(forwarder, name), seen, worker.events))
    for runner in runners:
        if runner.shared_experts is not None:
            runner.shared_experts._layer.register_forward_hook(lambda *_: worker.events.append("shared"))
        remote = runner.routed_experts.quant_method.experts.remote

        def fetched(*args: Any, call: Any = remote._wait) -> Any:
            worker.events.append("fetched")
            return call(*args)

        remote._wait = fetched
    execute = worker.model_runner.execute_model

    def step(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        seen["steps"] += scheduled.total_num_scheduled_tokens > 0
        seen["scheduled"] += scheduled.total_num_scheduled_tokens
        return execute(scheduled, *args, **kwargs)

    worker.model_runner.execute_model = step


def counts(worker: Any) -> dict[str, Any]:
    """What was counted, and what stands in the model."""
    names = [type(m).__name__ for m in worker.model_runner.model.modules()]
    parameters = sum(p.numel() for n, p in worker.model_runner.model.named_parameters() if ".routed_experts." in n)
    layers = names.count("RemoteRoutedExperts") + names.count("RemoteGptOssRoutedExperts")
    return {**worker.seen, "events": list(worker.events), "layers": layers, "expert_parameters": parameters}


def dummy(worker: Any) -> int:
    """Calls of one dummy batch, as idle ranks of data parallelism run them, and of one profiling run."""
    before = worker.seen["calls"]
    worker.execute_dummy_batch()
    worker.model_runner._dummy_run(16, is_profile=True)
    return worker.seen["calls"] - before


def main() -> None:
    from vllm import LLM, SamplingParams

    given = json.loads(sys.argv[1])
    options = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256, "dtype": "float32"}
    options |= {"skip_tokenizer_init": True, "compilation_config": {"custom_ops": ["none"]}, "enforce_eager": True}
    llm = LLM(given["checkpoint"], **{**options, **given.get("options", {})})
    llm.collective_rpc(watch)
    sampling = SamplingParams(temperature=0, max_tokens=given["new_tokens"], detokenize=False, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in given["prompts"]], sampling, use_tqdm=False)
    found = {
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        "ranks": llm.collective_rpc(counts),
        "dummy_calls": llm.collective_rpc(dummy),
    }
    print("\n@" + json.dumps(found), flush=True)
    os._exit(0)  # whatever the engine's processes still do


if __name__ == "__main__":
    main()
