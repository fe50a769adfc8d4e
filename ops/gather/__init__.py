"""Stage 3: bring the chosen blocks onto the device."""
