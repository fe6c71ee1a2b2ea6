"""Measure what a GPU computes, how fast, and in how much memory, against the CPU's numbers and the plan's."""
