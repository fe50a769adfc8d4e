"""Gather: bring the selected blocks from the pool into the hot buffer, which is on the device.

`fetch` copies the blocks that are missing. If a method may fetch after attention, `query_drift_gate` runs before
`fetch` and splits the heads. `fetch` serves some heads now. `prefetch_async` serves the others after attention, for the
next step, on a stream beside the next layers.
"""
