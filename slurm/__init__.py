"""SLURM job scripts and their processes: a Ray cluster over the nodes of a job, and one `replug` command on it."""
