"""Estimate the cost of a run from its configuration alone, without a model, corpus, GPU or network."""
