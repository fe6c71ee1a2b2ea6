"""Ray nodes of this process, in a folder of their own, where no other Ray on this machine looks for a cluster."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

QUIET = {"include_log_monitor": False}  # nobody reads the workers' logs here: a process less for each node


@contextmanager
def local_cluster(*nodes: dict[str, Any]) -> Iterator[Any]:
    """A Ray `Cluster` of nodes with so much room each, such as `num_gpus`; the first is the head."""
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        with patch.dict(os.environ, RAY_TMPDIR=folder):
            head = {"include_dashboard": False, "no_monitor": True, **QUIET, **nodes[0]}
            try:
                cluster = Cluster(initialize_head=True, head_node_args=head)
            except Exception:  # noqa: BLE001 - Ray's, where a busy machine takes 30 s to start a raylet
                cluster = Cluster(initialize_head=True, head_node_args=head)
            for node in nodes[1:]:
                cluster.add_node(**QUIET, **node)
        try:
            yield cluster
        finally:
            cluster.shutdown()


def join(address: str) -> None:
    """Connect this process to a cluster, whose workers are quiet."""
    import ray

    from replug.cluster.ray_cluster import quoted_python

    ray.init(address=address, log_to_driver=False, logging_level="ERROR", runtime_env=quoted_python())
