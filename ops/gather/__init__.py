"""Gather: bring the selected blocks from the pool into the hot buffer, which is on the device.

`fetch` copies the blocks that are missing. A method that may fetch after attention runs `query_drift_gate` before: it
splits the heads into those that `fetch` serves now and those that `prefetch_async` serves after attention, for the next
step, on a stream beside the next layers.
"""
