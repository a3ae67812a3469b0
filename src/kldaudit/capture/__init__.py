"""The step *capture*: replay the prompts through one launch of one arm and store the logits.

``step`` runs on the host and starts ``engine`` inside the engine's environment; ``engine`` loads vLLM with the
worker extension of ``worker``, compares what was asked for with what was selected (``asked``), replays the prompts
and writes the manifest (``manifest``).
"""
