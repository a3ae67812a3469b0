"""The manifest: what was there when the logits were computed.

``record`` says what it holds. ``packages``, ``libraries``, ``machine``, ``gpu``, ``caches``, ``variables`` and
``configuration`` read it inside the capturing process, after the run; ``environment`` puts them together. ``diff``
compares two manifests, ``cyclonedx`` and ``spdx`` write them in the standards' forms.
"""
