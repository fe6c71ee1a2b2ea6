"""When to retrieve: thresholds fitted to outcomes on disk, compared on the same splits (Mallen et al. 2023)."""
