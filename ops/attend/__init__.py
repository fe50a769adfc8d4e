"""Stage 4: attention over what is on the device."""
