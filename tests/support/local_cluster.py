"""Ray nodes of this process, in a folder of their own, where no other Ray on this machine looks for a cluster."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def local_cluster(*nodes: dict[str, Any]) -> Iterator[str]:
    """The address of nodes with so much room each, such as `num_gpus`; the first is the head."""
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        with patch.dict(os.environ, RAY_TMPDIR=folder):
            cluster = Cluster(initialize_head=True, head_node_args={**nodes[0], "include_dashboard": False})
            for node in nodes[1:]:
                cluster.add_node(**node)
        try:
            yield str(cluster.address)
        finally:
            cluster.shutdown()
