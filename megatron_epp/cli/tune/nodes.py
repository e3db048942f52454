"""Map of ranks to the nodes of a grid, as text, SVG and JSON."""

import textwrap

from megatron_epp.cli.compare import COLUMNS
from megatron_epp.ir.errors import printable
from megatron_epp.planner.tuning.node_map import NodeMap
from megatron_epp.show.grid import grid_drawing, grid_text
from megatron_epp.show.svg import to_svg


def node_lines(nodes: NodeMap) -> str:
    """Return the grid as text, followed by the hosts in the order of node ranks."""
    grid = nodes.grid
    rows, columns = grid.nodes
    summary = f"{nodes.topology.name}, {rows} x {columns} nodes: {nodes.layout} on "
    summary += f"{len(nodes.nodes)}, {len(grid.failed_nodes)} failed, {len(nodes.spares)} spare"
    if nodes.displaced:
        summary += f"; {nodes.displaced} stand in for a failed one of another column"
    ranks = ", ".join(f"{rank} {host}" for rank, host in enumerate(nodes.hosts))
    order = textwrap.fill(f"hosts by node rank: {ranks}", COLUMNS, subsequent_indent="  ")
    picture = grid_text(rows, columns, nodes.cells(), grid.failed_nodes)
    return f"\n{summary}\n\n{picture}\n{order}\n"


def grid_svg(nodes: NodeMap) -> str:
    """Return the grid as SVG; tooltips show the name and node rank of each node."""
    grid, ranks = nodes.grid, {place: rank for rank, place in enumerate(nodes.nodes)}
    every = [*grid.live, *grid.failed_nodes]
    titles = {
        place: f"{grid.host(place)}, node rank {ranks[place]}"
        if place in ranks
        else grid.host(place)
        for place in every
    }
    title = printable(f"{nodes.layout} on {nodes.topology.name}")
    rows, columns = grid.nodes
    drawing = grid_drawing(rows, columns, nodes.cells(), grid.failed_nodes, titles, title)
    return to_svg(drawing)


def node_facts(nodes: NodeMap) -> dict:
    """Return the map for JSON: nodes and hosts by node rank, spares, replacements."""
    return {
        "nodes": [list(place) for place in nodes.nodes],
        "hosts": list(nodes.hosts),
        "spares": [list(place) for place in nodes.spares],
        "displaced": nodes.displaced,
    }
