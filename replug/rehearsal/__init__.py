"""A run rehearsed on fake devices: the same composition and counts, with stand-ins in place of the models."""
