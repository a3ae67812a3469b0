"""The step *image*: make or adopt what the engine runs in, and say what it is, by digest."""
