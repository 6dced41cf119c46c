"""Rounds for CUDA: launched before the outcome of the round before is known.

No GPU has run them yet. They are tested on CPU tensors, the Triton kernel of tree attention in
Triton's interpreter; `python benchmarks/gpu.py` measures them where there is a GPU.

    rounds     TensorRounds: the work of `eyas.engine.rounds` for a device that need not wait
    tree       trees in tensors of fixed shape: grown, chosen, laid out as rows, walked
    sampling   from logits to tokens for many samples at once
    device     graphs, copies to the host, the state of each slot, time by the device's clock
"""
