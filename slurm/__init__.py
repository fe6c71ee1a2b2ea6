"""SLURM job scripts, and what they run: a Ray cluster over the nodes of a job, and one `replug` command on it."""
