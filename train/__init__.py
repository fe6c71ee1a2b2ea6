"""The LSR training loop: loss, Lightning module, batch pipeline, refresh, and the composition root."""
