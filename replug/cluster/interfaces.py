"""The network interface of a node's address, for gloo and NCCL.

They look for one by the host's name, which on many machines resolves to loopback: then ranks on other nodes wait for
them in vain. Ray's address of the node is one by which the others reach it.
"""

import os

import psutil

# NCCL takes a bare name for the beginning of one.
VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}


def use_interface_of(address: str) -> None:
    """In this process; what the user has set stays."""
    if (name := interface_of(address)) is not None:
        for variable, form in VARIABLES.items():
            os.environ.setdefault(variable, form.format(name))


def interface_of(address: str) -> str | None:
    """None for an address that is none of this machine's."""
    found = (name for name, known in psutil.net_if_addrs().items() if any(one.address == address for one in known))
    return next(found, None)
