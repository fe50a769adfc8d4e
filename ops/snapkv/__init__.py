"""SnapKV: the tokens of a prompt that its last queries attended to most."""
