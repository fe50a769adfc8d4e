"""Attend: attention over the keys and values on the device.

A decode step: `sparse_attention` over the ring and the selected blocks, or `dense_attention` over the whole pool.
A prompt: `prompt_attention`, exact, over everything before it; `window_attention` in layers with a sliding window.
"""
