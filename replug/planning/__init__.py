"""What a training run will cost, from its configuration alone: no model, corpus, GPU or network is touched."""
