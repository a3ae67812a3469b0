"""Inside the engine's environment: one launch of one arm, from loading to manifest.

Run as ``python -m kldaudit.capture.engine JOB.json``. It leaves the capture under its temporary name, the manifest and
``outcome.json`` in the job's folder; the host's step moves them to their places.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kldaudit.audit import ArmSpec, Settings
from kldaudit.capture.asked import checkpoint_scheme, compare_selected
from kldaudit.history import PromptRecord
from kldaudit.manifest.caches import cache_state
from kldaudit.manifest.configuration import plain
from kldaudit.manifest.environment import record_environment
from kldaudit.manifest.record import Asked, Kernel, Manifest
from kldaudit.records import read_json, write_json

EXTENSION = "kldaudit.capture.worker.CaptureExtension"
PROFILED_TOKENS = 256
OURS = "kldaudit:"
"""Begins the message of what our own hooks raise inside the engine."""


class RefusedError(Exception):
    """The engine will not or cannot run the arm: an outcome, not an error of kldaudit."""


def engine_arguments(settings: Settings, checkpoint: str) -> dict[str, Any]:
    """Arguments of vLLM's LLM: everything that bears on the numbers is said, nothing is left to a default."""
    arguments: dict[str, Any] = {
        "model": checkpoint,
        "dtype": settings.dtype,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "model_impl": settings.model_impl,
        "enforce_eager": settings.enforce_eager,
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": settings.chunk,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "seed": settings.seed,
        "worker_extension_cls": EXTENSION,
    }
    if settings.quantization:
        arguments["quantization"] = settings.quantization
    if settings.head_dtype:
        arguments["hf_overrides"] = {"head_dtype": settings.head_dtype}
    if settings.attention_backend != "auto":
        arguments["attention_config"] = {"backend": settings.attention_backend}
    return arguments


class Launch:
    """One engine process: loaded engine and what it reports."""

    def __init__(self, job: dict[str, Any]) -> None:
        """Take the job as the host's step wrote it."""
        self.job = job
        self.spec = ArmSpec.read(Path(job["spec"]))
        self.folder = Path(job["folder"])
        prompts = {name: PromptRecord.read(Path(path)) for name, path in job["prompts"].items()}
        self.prompts = {name: prompt.token_ids for name, prompt in prompts.items()}
        self.arguments = engine_arguments(self.spec.settings, job["checkpoint"])
        self.asked: list[Asked] = []
        self.selected: dict[str, Any] = {}
        self.kernels: list[Kernel] | str = "unknown: the engine did not run"
        self.counts: dict[str, Any] = {}
        self.configuration: Any = "unknown: the engine did not load"
        self.caches_before = cache_state()

    def event(self, **content: Any) -> None:
        """Append one event for the host's progress bar."""
        with (self.folder / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")

    def run(self) -> None:
        """Load, compare, replay, profile; raises RefusedError where the engine does not do it."""
        self.event(stage="loading the engine")
        self.llm = self._engine(self._load)
        self.selected = self._call("kldaudit_selected")
        self.configuration = plain(self.llm.llm_engine.vllm_config, self._places())
        config = read_json(Path(self.job["checkpoint"]) / "config.json")
        self.asked = compare_selected(self.spec.settings, checkpoint_scheme(config), self.selected)
        self._refuse_unsupported()
        self._replay_all()
        self._profile()

    def _places(self) -> dict[str, str]:
        """Absolute paths, and what stands for them in the manifest."""
        return {
            self.job["checkpoint"]: "{checkpoint}",
            str(self.folder): "{job}",
        }

    def _load(self) -> Any:
        from vllm import LLM

        return LLM(**self.arguments)

    def _engine(self, action: Callable[[], Any]) -> Any:
        """Run the engine's code; whatever it raises, short of the machine's own limits, is its refusal."""
        try:
            return action()
        except (OSError, MemoryError):
            raise
        except Exception as error:
            if OURS in str(error):
                raise
            traceback.print_exc()
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise RefusedError(f"{type(error).__name__}: {' '.join(lines)[:600]}") from error

    def _call(self, method: str, *arguments: Any) -> Any:
        return self.llm.collective_rpc(method, args=arguments)[0]

    def _refuse_unsupported(self) -> None:
        wrong = [line for line in self.asked if line.unsupported]
        if wrong and not self.spec.settings.allow_unsupported:
            raise RefusedError(
                f"{wrong[0].setting}: asked {wrong[0].asked}, which the selected backend does not implement although "
                "the engine accepted it; allow_unsupported: true runs it all the same"
            )

    def _replay_all(self) -> None:
        capture = self.spec.capture
        total = sum(len(token_ids) // capture.every for token_ids in self.prompts.values()) * capture.passes
        self.event(stage="capturing", total=total)
        attributes = {
            "audit": self.spec.audit,
            "arm": self.spec.arm,
            "launch": self.job["launch"],
            "spec_sha256": self.job["spec_sha256"],
        }
        self._call("kldaudit_open", str(self.folder / "capture.h5"), attributes, capture.layer_digests)
        keep = False
        try:
            for number in range(1, capture.passes + 1):
                for name, token_ids in self.prompts.items():
                    self._replay(name, number, token_ids)
            keep = True
        finally:
            self._call("kldaudit_close", keep)

    def _replay(self, name: str, number: int, token_ids: list[int]) -> None:
        self._call("kldaudit_begin", name, number, token_ids, self.spec.capture.every)
        started = time.perf_counter()
        self._engine(lambda: self._prefill(token_ids))
        seconds = time.perf_counter() - started
        counts = self._call("kldaudit_end")
        self.event(done=counts["positions"], seconds=seconds)
        self.counts.setdefault(name, {})[f"pass{number}"] = counts
        expected = len(token_ids) // self.spec.capture.every
        if counts["positions"] != expected:
            raise RuntimeError(f"prompt {name}: took {counts['positions']} positions, expected {expected}")
        if counts["nonfinite"]:
            raise RefusedError(
                f"the engine gave NaN, +inf or only -inf logits at {counts['nonfinite']} of {expected} positions of "
                f"prompt {name}"
            )

    def _prefill(self, token_ids: list[int]) -> None:
        from vllm import SamplingParams

        greedy = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        self.llm.generate([{"prompt_token_ids": token_ids}], greedy, use_tqdm=False)

    def _profile(self) -> None:
        token_ids = next(iter(self.prompts.values()))[:PROFILED_TOKENS]
        self._call("kldaudit_profile")
        self._prefill(token_ids)
        self.kernels = [Kernel(**one) for one in self._call("kldaudit_kernels")]

    def manifest(self, outcome: str) -> Manifest:
        """The manifest, recorded after the run."""
        import vllm
        from vllm import _version

        arguments = {key: value for key, value in self.arguments.items() if key != "model"}
        return Manifest(
            parents=self.job["parents"],
            audit=self.spec.audit,
            arm=self.spec.arm,
            launch=self.job["launch"],
            outcome=outcome,
            asked=self.asked,
            engine={
                "name": "vllm",
                "version": vllm.__version__,
                "commit": getattr(_version, "__commit_id__", None) or "unknown: vllm._version has no commit",
                "build": _build(),
                "arguments": arguments,
                "configuration": self.configuration,
            },
            selected=self.selected,
            kernels=self.kernels,
            capture=self.counts,
            caches={"before": self.caches_before, "after": cache_state()},
            **record_environment(Path(self.job["hashes"]), "/" if self.job["container"] else sys.prefix),
        )


def _build() -> dict[str, str]:
    """Which distribution vLLM is, and what its wheel was built for."""
    from importlib.metadata import distribution, packages_distributions

    names = packages_distributions().get("vllm") or []
    if not names:
        return {"distribution": "unknown: no distribution has the package vllm"}
    found = distribution(names[0])
    lines = (found.read_text("WHEEL") or "").splitlines()
    tags = [line.removeprefix("Tag: ") for line in lines if line.startswith("Tag: ")]
    return {
        "distribution": f"{found.name} {found.version}",
        "wheel": ", ".join(tags) or "unknown: the distribution has no WHEEL",
    }


def main(path: str) -> None:
    """Run the job and say how it ended in ``outcome.json``."""
    launch = Launch(read_json(Path(path)))
    try:
        launch.run()
        outcome = "captured"
    except RefusedError as refused:
        outcome = f"refused: {refused}"
    except OSError as error:
        # Not by way of the interpreter's end: after a failed write HDF5 crashes there, which would look like the engine
        traceback.print_exc()
        print(f"cannot write: {error}", flush=True)  # noqa: T201 - the log's last line
        os._exit(os.EX_IOERR)
    launch.event(stage="recording the manifest")
    launch.manifest(outcome).write(launch.folder / "manifest.json")
    write_json(launch.folder / "outcome.json", {"outcome": outcome})


if __name__ == "__main__":
    main(sys.argv[1])
