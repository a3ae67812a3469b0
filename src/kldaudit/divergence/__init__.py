"""The step *divergence*: KL(reference‖variant) in nats, FP64, from the stored bits, and its statistics.

``rows`` is the arithmetic of one position; ``statistics`` summarises positions; ``step`` reads the captures block by
block, so memory is bounded by a block.
"""
