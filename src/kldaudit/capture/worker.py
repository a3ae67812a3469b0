"""The vLLM worker extension: takes logits and hidden-state digests while a forced history is prefilled.

Only method names and plain values cross the process border, so it works with vLLM in one process or several. All
names begin with ``kldaudit_`` because vLLM refuses an extension that shadows a name of its worker.
"""

import re
from typing import Any

import numpy as np
import torch

from kldaudit.capture_file import BITS, CaptureWriter
from kldaudit.digests import GOLDEN, digest_weights
from kldaudit.manifest.kernels import RANGE, census

DECODER_LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.\d+$")
FINAL_NORM = re.compile(r"(^|\.)(norm|ln_f|final_layernorm)$")


class RowDigester:
    """The row digest of kldaudit.digests, computed by torch where the rows are."""

    def __init__(self) -> None:
        """Start with no weights; they are made once per row width and device."""
        self.weights: dict[tuple[int, torch.device], torch.Tensor] = {}

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Digest rows [n, columns] of any dtype; returns int64 [n], the bits of the uint64 digest."""
        rows = rows.detach().contiguous()
        if rows.storage_offset() * rows.element_size() % 8:
            rows = rows.clone()
        data = rows.view(torch.uint8)
        if data.shape[-1] % 8:
            data = torch.nn.functional.pad(data, (0, -data.shape[-1] % 8))
        words = data.view(torch.int64)
        key = (words.shape[-1], words.device)
        if key not in self.weights:
            self.weights[key] = torch.from_numpy(digest_weights(key[0]).view(np.int64)).to(words.device)
        mixed = words * (GOLDEN - 2**64)
        mixed ^= (mixed >> 32) & 0xFFFFFFFF
        mixed *= self.weights[key]
        return mixed.sum(-1)


class Replay:
    """One prompt in one pass: which rows to take, and what was taken."""

    def __init__(self, n_tokens: int, every: int) -> None:
        """Expect a prompt of ``n_tokens`` and take the positions every - 1, 2 * every - 1 and so on."""
        self.n_tokens = n_tokens
        self.every = every
        self.seen = 0
        self.taken = 0
        self.nonfinite = 0
        self.row_digests: list[torch.Tensor] = []
        self.layer_digests: dict[str, list[torch.Tensor]] = {}
        self.differing_rows: list[int] = []
        self.differing_bits: list[np.ndarray[Any, Any]] = []

    def rows_of_step(self, scheduled: int, device: torch.device) -> torch.Tensor:
        """Row indices, within this step's ``scheduled`` tokens, of the positions to take."""
        first = (self.every - 1 - self.seen) % self.every
        end = min(scheduled, self.n_tokens - self.seen)
        return torch.arange(first, max(first, end), self.every, device=device)


class CaptureExtension:
    """Methods that vLLM adds to its worker (``worker_extension_cls``)."""

    model_runner: Any
    vllm_config: Any
    rank: int

    def kldaudit_selected(self) -> dict[str, Any]:
        """What the engine selected: per attention layer and per linear layer, and the resolved configuration."""
        attention, linear = [], []
        for name, module in self.model_runner.get_model().named_modules():
            backend = getattr(module, "attn_backend", None)
            if backend is not None:
                asked = self.vllm_config.cache_config.cache_dtype
                attention.append(
                    {
                        "layer": name,
                        "backend": backend.get_name(),
                        "implementation": type(getattr(module, "impl", None)).__name__,
                        "kv_cache_dtype": str(getattr(module, "kv_cache_dtype", asked)),
                        "kv_cache_torch_dtype": str(getattr(module, "kv_cache_torch_dtype", "unknown")),
                        "kv_cache_dtype_supported": bool(backend.supports_kv_cache_dtype(asked)),
                        "kv_scales": _kv_scales(module),
                        "flash_attention_version": getattr(
                            getattr(module, "impl", None), "vllm_flash_attn_version", None
                        ),
                    }
                )
            method = getattr(module, "quant_method", None)
            if method is not None and "KVCache" not in type(method).__name__:
                linear.append({"layer": name, "kind": type(module).__name__, **_linear_kernel(module, method)})
        return {"attention": attention, "linear": linear, **self._kldaudit_resolved()}

    def _kldaudit_resolved(self) -> dict[str, Any]:
        config = self.vllm_config
        model = self.model_runner.get_model()
        return {
            "model_class": f"{type(model).__module__}.{type(model).__name__}",
            "model_runner": type(self.model_runner).__module__,
            "device": str(self.model_runner.device),
            "torch_threads": torch.get_num_threads(),
            "vocab_size": config.model_config.get_vocab_size(),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "head_dtype": str(config.model_config.head_dtype).removeprefix("torch."),
            "quantization": config.model_config.quantization,
            "max_model_len": config.model_config.max_model_len,
            "enforce_eager": config.model_config.enforce_eager,
            "compilation_mode": str(config.compilation_config.mode),
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
            "chunk": config.scheduler_config.max_num_batched_tokens,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "kv_cache_dtype": str(config.cache_config.cache_dtype),
            "kv_block_size": config.cache_config.block_size,
            "speculative_decoding": config.speculative_config is not None,
            "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
            "pipeline_parallel_size": config.parallel_config.pipeline_parallel_size,
            "data_parallel_size": config.parallel_config.data_parallel_size,
            "seed": config.model_config.seed,
        }

    def kldaudit_open(self, path: str, attributes: dict[str, Any], layer_digests: bool) -> None:
        """Hook the model and, on rank 0, create the capture under a temporary name."""
        from pathlib import Path

        self.kldaudit_writer: CaptureWriter | None = None
        self.kldaudit_target = (Path(path), attributes)
        self.kldaudit_digest = RowDigester()
        self.kldaudit_replay: Replay | None = None
        self.kldaudit_dataset: Any = None
        self.kldaudit_prompt = ("", 0)
        self.kldaudit_step: Any = None
        self.kldaudit_passes: dict[str, list[Replay]] = {}
        self._kldaudit_gate()
        model = self.model_runner.get_model()
        self.kldaudit_hooks = [model.register_forward_hook(self._kldaudit_take, with_kwargs=True)]
        if layer_digests:
            for name, module in _hidden_state_modules(model):
                self.kldaudit_hooks.append(module.register_forward_hook(self._kldaudit_layer_hook(name)))

    def _kldaudit_gate(self) -> None:
        """Know, inside the hooks, what the scheduler wants from this step; dummy and profile runs have no step."""
        runner = self.model_runner
        original = runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.kldaudit_step = scheduler_output
            try:
                return original(scheduler_output, *args, **kwargs)
            finally:
                self.kldaudit_step = None

        runner.execute_model = execute_model

    def kldaudit_begin(self, prompt: str, number: int, token_ids: list[int], every: int) -> None:
        """Begin pass ``number`` (from 1) of a prompt."""
        self.kldaudit_prompt = (prompt, number)
        self.kldaudit_replay = Replay(len(token_ids), every)
        self.kldaudit_tokens = np.asarray(token_ids, np.int32)
        self.kldaudit_dataset = None

    def _kldaudit_scheduled(self) -> int:
        step = self.kldaudit_step
        if step is None or self.kldaudit_replay is None or not step.total_num_scheduled_tokens:
            return 0
        if len(step.num_scheduled_tokens) != 1:
            raise RuntimeError("kldaudit: more than one request in a step")
        return int(step.total_num_scheduled_tokens)

    def _kldaudit_take(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        scheduled, replay = self._kldaudit_scheduled(), self.kldaudit_replay
        if not scheduled or replay is None:
            return
        hidden = output[0] if isinstance(output, tuple) else output
        positions = kwargs["positions"] if "positions" in kwargs else args[1]
        first = int(positions.reshape(-1)[0])
        if first != replay.seen and replay.seen < replay.n_tokens:
            raise RuntimeError(f"kldaudit: step begins at position {first}, expected {replay.seen}")
        rows = replay.rows_of_step(scheduled, hidden.device)
        replay.seen += scheduled
        if not len(rows):
            return
        logits = module.compute_logits(hidden[:scheduled].index_select(0, rows))
        if self.rank != 0:
            return
        digests = self.kldaudit_digest(logits)
        if self.kldaudit_prompt[1] == 1:
            self._kldaudit_store(logits)
        else:
            self._kldaudit_keep_differences(logits, digests)
        replay.row_digests.append(digests.cpu())
        largest = logits.amax(-1)  # NaN if any is NaN, -inf if all are
        replay.nonfinite += int((~(largest.abs() < torch.inf)).sum())
        replay.taken += len(rows)

    def _kldaudit_store(self, logits: torch.Tensor) -> None:
        prompt, _ = self.kldaudit_prompt
        replay = self.kldaudit_replay
        assert replay is not None
        if self.kldaudit_writer is None:
            path, attributes = self.kldaudit_target
            dtype = str(logits.dtype).removeprefix("torch.")
            self.kldaudit_writer = CaptureWriter(
                path, {**attributes, "vocab_size": logits.shape[1], "logits_dtype": dtype}
            )
        writer = self.kldaudit_writer
        if self.kldaudit_dataset is None:
            positions = np.arange(replay.every - 1, replay.n_tokens, replay.every, dtype=np.int64)
            writer.add_prompt(prompt, self.kldaudit_tokens, positions)
            self.kldaudit_dataset = writer.create_logits(f"prompts/{prompt}/logits", len(positions))
        writer.write_rows(self.kldaudit_dataset, replay.taken, _bits(logits))

    def _kldaudit_keep_differences(self, logits: torch.Tensor, digests: torch.Tensor) -> None:
        """Keep the rows whose bits differ from the first pass; by their digests the others are the same."""
        prompt, _ = self.kldaudit_prompt
        replay = self.kldaudit_replay
        assert replay is not None
        first_pass = torch.cat(self.kldaudit_passes[prompt][0].row_digests)
        expected = first_pass[replay.taken : replay.taken + len(digests)]
        differing = torch.nonzero(digests.cpu() != expected).flatten()
        if len(differing):
            replay.differing_rows += (differing + replay.taken).tolist()
            replay.differing_bits.append(_bits(logits[differing.to(logits.device)]))

    def _kldaudit_layer_hook(self, name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            scheduled, replay = self._kldaudit_scheduled(), self.kldaudit_replay
            if not scheduled or replay is None:
                return
            tensors = [t for t in (output if isinstance(output, tuple) else (output,)) if torch.is_tensor(t)]
            for index, tensor in enumerate(tensors):
                if tensor.is_floating_point():
                    rows = replay.rows_of_step(scheduled, tensor.device)
                    states = tensor.reshape(-1, tensor.shape[-1])[:scheduled].index_select(0, rows)
                    label = name if index == 0 else f"{name}[{index}]"
                    replay.layer_digests.setdefault(label, []).append(self.kldaudit_digest(states))

        return hook

    def kldaudit_end(self) -> dict[str, int]:
        """End the pass; returns how many positions were taken and how many of them are no distribution."""
        replay = self.kldaudit_replay
        assert replay is not None
        self.kldaudit_replay = None
        prompt, number = self.kldaudit_prompt
        self.kldaudit_passes.setdefault(prompt, []).append(replay)
        if replay.differing_rows and self.kldaudit_writer is not None:
            writer, name = self.kldaudit_writer, f"prompts/{prompt}/pass{number}"
            dataset = writer.create_logits(f"{name}/logits", len(replay.differing_rows))
            writer.write_rows(dataset, 0, np.concatenate(replay.differing_bits))
            writer.file[name].create_dataset("rows", data=np.asarray(replay.differing_rows, np.int64))
            replay.differing_bits.clear()
        return {"positions": replay.taken, "nonfinite": replay.nonfinite, "differing": len(replay.differing_rows)}

    def kldaudit_close(self, keep: bool) -> None:
        """Unhook the model; finish the capture, or remove it if it is not to be kept."""
        for hook in self.kldaudit_hooks:
            hook.remove()
        self.model_runner.__dict__.pop("execute_model", None)
        writer = self.kldaudit_writer
        if writer is None:
            return
        if not keep:
            writer.abandon()
            return
        for prompt, passes in self.kldaudit_passes.items():
            names = list(passes[0].layer_digests)
            layers = [[torch.cat(one.layer_digests[name]).cpu().numpy() for name in names] for one in passes]
            writer.write_digests(
                prompt,
                np.stack([torch.cat(one.row_digests).numpy() for one in passes]).view(np.uint64),
                np.stack(layers).view(np.uint64) if names else None,
                names,
            )
        writer.finish()

    def kldaudit_profile(self) -> None:
        """Profile what runs until ``kldaudit_kernels``; in eager mode with a named range around each module."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.kldaudit_ranges: list[Any] = []
        self.kldaudit_hooks = []
        eager = self.vllm_config.model_config.enforce_eager
        for module in self.model_runner.get_model().modules() if eager else ():
            self.kldaudit_hooks.append(module.register_forward_pre_hook(self._kldaudit_enter))
            self.kldaudit_hooks.append(module.register_forward_hook(self._kldaudit_leave, always_call=True))
        self.kldaudit_profiler = torch.profiler.profile(activities=activities)
        self.kldaudit_profiler.start()

    def _kldaudit_enter(self, module: Any, args: Any) -> None:
        entered = torch.profiler.record_function(f"{RANGE}{type(module).__name__}")
        entered.__enter__()
        self.kldaudit_ranges.append(entered)

    def _kldaudit_leave(self, module: Any, args: Any, output: Any) -> None:
        self.kldaudit_ranges.pop().__exit__(None, None, None)

    def kldaudit_kernels(self) -> list[dict[str, Any]]:
        """End the profile; returns the census of kernels as plain values."""
        self.kldaudit_profiler.stop()
        for hook in self.kldaudit_hooks:
            hook.remove()
        return [one.model_dump() for one in census(self.kldaudit_profiler.events())]


def _bits(logits: torch.Tensor) -> np.ndarray[Any, Any]:
    """Raw bits of logits [n, vocab_size] on the host, as the unsigned type of their dtype."""
    unsigned = BITS[str(logits.dtype).removeprefix("torch.")]
    signed = torch.int16 if unsigned is np.uint16 else torch.int32
    return logits.contiguous().view(signed).cpu().numpy().view(unsigned)


def _hidden_state_modules(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Decoder layers, their direct children and the final norm; a module that layers share would run out of order."""
    chosen = []
    for name, module in model.named_modules():
        if "visual" in name or "rotary" in name:
            continue
        parent = name.rpartition(".")[0]
        if DECODER_LAYER.search(name) or DECODER_LAYER.search(parent) or FINAL_NORM.search(name):
            chosen.append((name, module))
    return chosen


def _linear_kernel(module: Any, method: Any) -> dict[str, Any]:
    """Quantization method, scheme and kernels of one linear layer, and its activation type where it says so."""
    scheme = getattr(module, "scheme", None)
    holders = [holder for holder in (method, scheme) if holder is not None]
    kernels = sorted(
        {
            type(value).__name__
            for holder in holders
            for value in vars(holder).values()
            if type(value).__name__.endswith("Kernel")
        }
    )
    w4a8 = getattr(module, "use_w4a8", None)
    return {
        "method": type(method).__name__,
        "scheme": None if scheme is None else type(scheme).__name__,
        "kernels": kernels,
        "activations": None if w4a8 is None else "int8" if w4a8 else "16-bit",
    }


def _kv_scales(module: Any) -> dict[str, float | None]:
    """Scales of one attention layer's query, keys and values; None where the layer has none."""
    return {name: getattr(module, f"_{name}_scale_float", None) for name in ("q", "k", "v")}
