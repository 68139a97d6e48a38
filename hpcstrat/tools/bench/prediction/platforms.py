"""Descriptions, in SimGrid's XML, of the kinds of networks that clusters have.

https://simgrid.org/doc/latest/Platform_examples.html describes the XML elements.
Besides measurements, `hpcstrat bench predict` needs assumptions about each kind of
network. The assumptions are the constants below; docs/user-guide/prediction.md lists
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["MOST_NODES", "NETWORKS", "Network", "Platform"]

# Latency of a switch with its cable, in InfiniBand or Slingshot, and in Ethernet.
_HOP_SECONDS = 150e-9
_ETHERNET_HOP_SECONDS = 1e-6
# A switch has 40 ports, like InfiniBand's HDR switches; half of them face down.
_DOWN_PORTS = 20
# In Slingshot, a group has 32 switches, all connected, with 16 nodes each.
_GROUP_SWITCHES, _SWITCH_NODES = 32, 16
# The global links of a group have half of the bandwidth of the group's nodes.
_TAPER = 2
# A rack has 32 nodes, and its uplink has a fourth of the nodes' bandwidth.
_RACK_NODES = 32
_OVERSUBSCRIPTION = 4


@dataclass(frozen=True, slots=True)
class Network:
    """The kind of a network, and latency and bandwidth measured between two nodes."""

    kind: str
    latency_seconds: float
    bytes_per_second: float
    # Factor by which all times are multiplied in the simulator.
    slower: float = 1.0

    def in_world(self, slower: float) -> Network:
        """Return the same network with all times multiplied by a factor."""
        return Network(
            self.kind,
            self.latency_seconds * slower,
            self.bytes_per_second / slower,
            slower,
        )


@dataclass(frozen=True, slots=True)
class Platform:
    """A network in SimGrid's XML, with at least the requested number of nodes."""

    xml: str
    # Names of the nodes, in their order in the network.
    hosts: tuple[str, ...]
    # Time that a receiving host needs for each message, besides the time of its route.
    receive_seconds: float
    # A description of the network for people.
    words: str


def _fat_tree(network: Network, num_nodes: int) -> Platform:
    """Return a fat tree of 40-port switches with full bisection bandwidth."""
    down, left = list[int](), num_nodes
    # All ports of the topmost switches face down.
    while left > 2 * _DOWN_PORTS:
        down.append(_DOWN_PORTS)
        left = -(-left // _DOWN_PORTS)
    down.append(left)
    up = [1] + [_DOWN_PORTS] * (len(down) - 1)
    levels = (_commas(down), _commas(up), _commas([1] * len(down)))
    parameters = f"{len(down)};{';'.join(levels)}"
    words = (
        f"fat tree of {len(down)} level{'s' * (len(down) > 1)} of 40-port switches, "
        "full bisection"
    )
    size = math.prod(down)
    return _switched(
        network,
        num_nodes,
        words,
        topology="FAT_TREE",
        parameters=parameters,
        size=size,
    )


def _dragonfly(network: Network, num_nodes: int) -> Platform:
    """Return a dragonfly: groups of 512 nodes, with links between each two groups."""
    each = _GROUP_SWITCHES * _SWITCH_NODES
    groups = -(-num_nodes // each)
    between = max(1, each // _TAPER // max(1, groups - 1))
    # In SimGrid's model, all traffic to another group leaves through one switch, so the
    # local link from each switch to it must have a switch's share of global bandwidth.
    local = _SWITCH_NODES // _TAPER
    parameters = f"{groups},{between};1,1;{_GROUP_SWITCHES},{local};{_SWITCH_NODES}"
    words = (
        f"dragonfly of {groups} group{'s' * (groups > 1)} of {each} nodes, global "
        "links for half of their traffic, minimal routes"
    )
    return _switched(
        network,
        num_nodes,
        words,
        topology="DRAGONFLY",
        parameters=parameters,
        size=groups * each,
    )


def _switched(
    network: Network,
    num_nodes: int,
    words: str,
    *,
    topology: str,
    parameters: str,
    size: int,
) -> Platform:
    # Attribute to the hosts the measured latency minus the latency of two links with a
    # switch. This part is the same for any number of switches on the route.
    hop = min(_HOP_SECONDS * network.slower, network.latency_seconds / 2)
    cluster = _cluster(
        ("net", "n", 0, size),
        hop,
        network.bytes_per_second,
        f' topology="{topology}" topo_parameters="{parameters}"',
    )
    return Platform(
        _document(f'<zone id="world" routing="Full">{cluster}</zone>'),
        tuple(f"n{number}" for number in range(num_nodes)),
        network.latency_seconds - 2 * hop,
        words,
    )


def _ethernet(network: Network, num_nodes: int) -> Platform:
    """Return one Ethernet switch, or racks with one switch and a shared uplink each."""
    racks = -(-num_nodes // _RACK_NODES)
    half = network.latency_seconds / 2
    names = tuple(f"n{number}" for number in range(num_nodes))
    parts, speed = [], network.bytes_per_second
    for rack in range(racks):
        stop = min(num_nodes, (rack + 1) * _RACK_NODES)
        ends = f"rack{rack}", "n", rack * _RACK_NODES, stop
        parts.append(_cluster(ends, half, speed, f' router_id="switch{rack}"'))
    if racks == 1:
        body, words = "".join(parts), "Ethernet of one switch"
    else:
        body = "".join([*parts, *_uplinks(racks, network)])
        words = (
            f"Ethernet of {racks} racks of {_RACK_NODES} nodes, uplinks for a fourth "
            "of their traffic"
        )
    xml = _document(f'<zone id="world" routing="Floyd">{body}</zone>')
    return Platform(xml, names, 0.0, words)


def _uplinks(racks: int, network: Network) -> list[str]:
    parts = ['<zone id="core" routing="None"><router id="core_switch"/></zone>']
    speed = network.bytes_per_second * _RACK_NODES / _OVERSUBSCRIPTION
    latency = _ETHERNET_HOP_SECONDS * network.slower
    for rack in range(racks):
        # All nodes of a rack share its uplink, which has one link for each direction.
        parts.append(
            f'<link id="up{rack}" bandwidth="{speed!r}Bps" '
            f'latency="{latency!r}s" sharing_policy="SPLITDUPLEX"/>'
        )
    for rack in range(racks):
        parts.append(
            f'<zoneRoute src="rack{rack}" dst="core" gw_src="switch{rack}" '
            f'gw_dst="core_switch"><link_ctn id="up{rack}" direction="UP"/></zoneRoute>'
        )
    return parts


def _cluster(
    ends: tuple[str, str, int, int], latency: float, speed: float, more: str
) -> str:
    name, prefix, start, stop = ends
    return (
        f'<cluster id="{name}" prefix="{prefix}" suffix="" '
        f'radical="{start}-{stop - 1}" speed="1Gf" bw="{speed!r}Bps" '
        f'lat="{latency!r}s" sharing_policy="SPLITDUPLEX"{more}/>'
    )


def _document(body: str) -> str:
    return (
        '<?xml version="1.0"?>\n'
        '<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">\n'
        f'<platform version="4.1">{body}</platform>\n'.replace("><", ">\n<")
    )


def _commas(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


NETWORKS: dict[str, Callable[[Network, int], Platform]] = {
    "fat-tree": _fat_tree,
    "dragonfly": _dragonfly,
    "ethernet": _ethernet,
}
"""For each kind of network, the function that makes the platform of some nodes."""

MOST_NODES = _GROUP_SWITCHES * _GROUP_SWITCHES * _SWITCH_NODES
"""Most nodes: a dragonfly of SimGrid has at most one group per switch of a group."""
