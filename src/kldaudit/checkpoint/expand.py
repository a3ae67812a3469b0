"""Expand a GGUF file to BF16 safetensors with transformers: ``python -m kldaudit.checkpoint.expand GGUF OUT``."""

import sys
from pathlib import Path

from kldaudit.checkpoint.made_with import write_versions


def expand(gguf: Path, output: Path) -> None:
    """Dequantize a GGUF file into a folder that transformers and vLLM load, weights rounded to BF16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(output)


if __name__ == "__main__":
    gguf, output = (Path(argument) for argument in sys.argv[1:])
    expand(gguf, output)
    write_versions(output, "transformers", "gguf", "torch")
