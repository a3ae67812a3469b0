"""The step *prompt*: render a forced token history with the model's own chat template and record its spans.

``step`` runs on the host; ``render`` runs inside the engine's environment, where the tokenizer's library is.
"""
