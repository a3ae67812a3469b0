"""The step *checkpoint*: resolve weights, expand or quantize them where the audit says so, and record every file.

``step`` runs on the host; ``expand`` (GGUF to safetensors) and ``quantize`` run inside the engine's environment with
the ecosystem's own libraries.
"""
