"""Quantize a checkpoint without data: ``python -m kldaudit.checkpoint.quantize BASE QUANTIZE.json OUT``.

Schemes, ranges, rounding and the packed format are those of compressed-tensors; this module feeds it each group's
smallest and largest weight (round to nearest, no calibration).
"""

import sys
from pathlib import Path
from typing import Any

from kldaudit.audit import Quantize
from kldaudit.checkpoint.made_with import write_versions


def quantization_scheme(settings: Quantize) -> Any:
    """The compressed-tensors scheme of an audit's ``quantize`` section."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    if settings.scheme == "W8A8-INT8":
        weights = QuantizationArgs(num_bits=8, type="int", strategy="channel", symmetric=True)
        inputs = QuantizationArgs(num_bits=8, type="int", strategy="token", symmetric=True, dynamic=True)
        return QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
    weights = QuantizationArgs(
        num_bits=4, type="int", strategy="group", group_size=settings.group_size, symmetric=settings.symmetric
    )
    return QuantizationScheme(targets=["Linear"], weights=weights)


def quantize(base: Path, output: Path, settings: Quantize) -> None:
    """Quantize all linear layers but the LM head, and save the checkpoint in compressed-tensors' format."""
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    config = QuantizationConfig(
        config_groups={"group_0": quantization_scheme(settings)},
        ignore=["lm_head"],
        quantization_status=QuantizationStatus.INITIALIZED,
    )
    apply_quantization_config(model, config)
    with torch.no_grad():
        for module in model.modules():
            if getattr(module, "quantization_scheme", None) is not None:
                _set_scales(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(output)
    compressor.update_config(str(output))
    AutoTokenizer.from_pretrained(base).save_pretrained(output)


def _set_scales(module: Any) -> None:
    """Scale and zero point of each group (or output channel) from its smallest and largest weight."""
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = module.quantization_scheme.weights
    weight = module.weight.detach().float()
    columns = arguments.group_size or weight.shape[1]
    groups = weight.unflatten(-1, (-1, columns))
    scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
    module.weight_scale.data.copy_(scale)
    module.weight_zero_point.data.copy_(zero_point)


if __name__ == "__main__":
    base, settings, output = (Path(argument) for argument in sys.argv[1:])
    quantize(base, output, Quantize.model_validate_json(settings.read_text(encoding="utf-8")))
    write_versions(output, "compressed-tensors", "transformers", "torch")
