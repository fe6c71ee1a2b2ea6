"""Which IP addresses a page may be fetched from: public ones only.

A page, a redirect or a name server can name any address: the metadata server of a cloud, a router, this machine.
So it is decided by what an address is, not by how it was written. IPv6 is refused but for global unicast (2000::/3)
without the parts of it that carry or stand for something else; that leaves out loopback, link-local (fe80::/10), unique
local (fc00::/7, with the metadata address fd00:ec2::254), multicast, and IPv4 addresses in another form, such as
::ffff:127.0.0.1. NAT64 (64:ff9b::/96) is judged by the IPv4 address inside, since a network without IPv4 reaches all of
IPv4 by it. The lists are IANA's registries of special-purpose addresses.
"""

import ipaddress

NOT_PUBLIC_V4 = tuple(
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this host
        "10.0.0.0/8",
        "100.64.0.0/10",  # shared by a provider's customers (CGNAT)
        "127.0.0.0/8",
        "169.254.0.0/16",  # link-local, with the metadata servers of clouds
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",  # relays of 6to4
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",  # benchmarks of networks
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
)
GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
NOT_PUBLIC_V6 = tuple(
    ipaddress.IPv6Network(network)
    for network in (
        "2001::/23",  # protocols, with Teredo, which carries IPv4
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4, which carries IPv4
        "3fff::/20",  # documentation
    )
)
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
METADATA_V4 = ipaddress.IPv4Address("168.63.129.16")  # Azure's, which is a public address by its number


def is_public(address: str) -> bool:
    """Whether a numeric address is one of the public internet; False for what is no address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv4Address):
        return _is_public_v4(parsed)
    if parsed in NAT64:
        return _is_public_v4(ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF))
    return parsed in GLOBAL_V6 and not any(parsed in network for network in NOT_PUBLIC_V6)


def _is_public_v4(address: ipaddress.IPv4Address) -> bool:
    return address != METADATA_V4 and not any(address in network for network in NOT_PUBLIC_V4)
