"""What capturing costs, as ratios to plain prefill of the same prompt in the same process.

Run with the engine's interpreter, on the records that an audit left:

    .engines/vllm-cpu/bin/python benchmarks/capture_overhead.py results/smollm2-cpu --prompt agent --repeats 3

Prints plain prefill (1.0), prefill with capture, with layer digests too, and with vLLM's own prompt_logprobs=20. The
kinds take turns, so a drift of the machine hits all of them; on a machine shared with others the minima say more.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from kldaudit.audit import ArmSpec, Audit
from kldaudit.capture.engine import engine_arguments
from kldaudit.capture.step import engine_variables
from kldaudit.runtime.variables import FIXED


def main() -> None:
    """Time the kinds in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--prompt", default="agent")
    parser.add_argument("--tokens", type=int, help="only the prompt's first tokens")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    audit = Audit.read(options.results / "spec.json")
    spec = ArmSpec.read(options.results / "arms" / f"{audit.reference}.json")
    os.environ.update({**FIXED, **engine_variables(spec)})
    token_ids = json.loads((options.results / "prompts" / f"{options.prompt}.json").read_text())["token_ids"]
    token_ids = token_ids[: options.tokens]

    from vllm import LLM, SamplingParams

    llm = LLM(**engine_arguments(spec.settings, str(options.results / "checkpoints" / spec.checkpoint)))

    def call(method: str, *arguments: Any) -> Any:
        return llm.collective_rpc(method, args=arguments)[0]

    def prefill(**sampling: Any) -> float:
        parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, **sampling)
        started = time.perf_counter()
        llm.generate([{"prompt_token_ids": token_ids}], parameters, use_tqdm=False)
        return time.perf_counter() - started

    def captured(layers: bool) -> float:
        with tempfile.TemporaryDirectory() as folder:
            attributes = {"audit": "benchmark", "arm": "benchmark", "launch": 1, "spec_sha256": ""}
            call("kldaudit_open", f"{folder}/capture.h5", attributes, layers)
            call("kldaudit_begin", "prompt", 1, token_ids, spec.capture.every)
            seconds = prefill()
            call("kldaudit_end")
            started = time.perf_counter()
            call("kldaudit_close", True)
            return seconds + time.perf_counter() - started

    kinds = {
        "plain prefill": prefill,
        "capture": lambda: captured(False),
        "capture and layer digests": lambda: captured(True),
    }
    prefill()
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(options.repeats):
        for name, kind in kinds.items():
            times[name].append(kind())
    times["prompt_logprobs=20"] = [prefill(prompt_logprobs=20)]
    plain = times["plain prefill"]
    print(f"{len(token_ids)} tokens, every {spec.capture.every}, chunk {spec.settings.chunk}; ratios to plain prefill")
    print(f"{'':26} {'median s':>9} {'of medians':>11} {'of minima':>10}  all, s")
    for name, seconds in times.items():
        medians, minima = statistics.median(seconds) / statistics.median(plain), min(seconds) / min(plain)
        every = " ".join(f"{one:.2f}" for one in seconds)
        print(f"{name:26} {statistics.median(seconds):9.2f} {medians:11.3f} {minima:10.3f}  {every}")


if __name__ == "__main__":
    main()
