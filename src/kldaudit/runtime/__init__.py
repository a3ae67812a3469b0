"""The engine's environment as a thing to run Python in.

``record`` is what it is (``image.json``), ``run`` runs a module in it; ``venv``, ``docker`` and ``apptainer`` are the
three ways of doing so, ``variables`` what reaches the engine from outside.
"""
