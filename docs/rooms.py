"""The picture of the rooms, docs/rooms.svg, drawn from the imports.

    python docs/rooms.py [FILE]        write the picture there (`make docs` writes docs/rooms.svg)

A room is a folder of a package, or a module that lies in no folder.  An arrow says how many imports lead from one room
to another.  Rooms stand on floors, so arrows point down; where rooms import each other in a circle, the arrows that
close it with the fewest imports are red.  What a room imports of other packages is written in its box.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

import grimp

from layers import Layers, layered

__all__ = ["Rooms", "draw", "main", "read"]

ROWS = (("expertctl", "expertd_server"), ("expertd_client", "expertd_kernels"), ("expertd",))
"""Of panels, from above, each from left to right."""
PACKAGES = tuple(package for row in ROWS for package in row)
Edge = tuple[str, str]

BOX_W, BOX_H, GAP_Y, PAD, HEAD = 140, 58, 74, 26, 34
STYLE = """text{font-family:"DejaVu Sans",Verdana,sans-serif;font-size:11px;fill:#222}
.package{font-size:15px;font-weight:bold}.room{font-size:13px;font-weight:bold}.small{font-size:9px;fill:#555}
.count{font-size:10px;fill:#345;paint-order:stroke;stroke:#fff;stroke-width:3px}.up .count{fill:#c00}
.panel{fill:#f7f7f4;stroke:#bbb}.box{fill:#fff;stroke:#678;stroke-width:1.2}
.arrow{fill:none;stroke:#9ab;stroke-width:1.2}.up .arrow{stroke:#c00;stroke-width:1.8}
.bundle{fill:none;stroke:#456;stroke-width:3}.bundle-count{font-size:12px;font-weight:bold;fill:#234}"""


@dataclass(frozen=True)
class Rooms:
    """rooms: package -> room -> its modules; inside: package -> (room, room) -> imports; across: (room with its
    package, package) -> imports."""

    rooms: Mapping[str, Mapping[str, int]]
    inside: Mapping[str, Mapping[Edge, int]]
    across: Mapping[tuple[str, str, str], int]

    def bundles(self) -> dict[Edge, int]:
        """(package, package) -> imports."""
        found: dict[Edge, int] = {}
        for (package, _, other), n in self.across.items():
            found[package, other] = found.get((package, other), 0) + n
        return found


def _room(module: str) -> Edge:
    """(package, room) of a module."""
    package, _, rest = module.partition(".")
    first = rest.partition(".")[0] or "__init__"
    return package, first


def read(packages: Sequence[str] = PACKAGES) -> Rooms:
    """The rooms as they import each other now."""
    graph = grimp.build_graph(packages[0], *packages[1:], cache_dir=None)
    rooms: dict[str, dict[str, int]] = {p: {} for p in packages}
    inside: dict[str, dict[Edge, int]] = {p: {} for p in packages}
    across: dict[tuple[str, str, str], int] = {}
    for module in sorted(graph.modules):
        package, room = _room(module)
        rooms[package][room] = rooms[package].get(room, 0) + 1
        for target in graph.find_modules_directly_imported_by(module):
            other, there = _room(target)
            if other != package:
                across[package, room, other] = across.get((package, room, other), 0) + 1
            elif there != room:
                inside[package][room, there] = inside[package].get((room, there), 0) + 1
    return Rooms(rooms, inside, across)


def _size(found: Layers) -> tuple[float, float]:
    """Width and height of a panel."""
    return found.width * BOX_W + 2 * PAD, len(found.floors) * (BOX_H + GAP_Y) - GAP_Y + 2 * PAD + HEAD


def _at(found: Layers, node: str, x0: float, y0: float) -> tuple[float, float]:
    """Middle of a room's box, or of the place where an arrow passes its floor."""
    floor = len(found.floors) - 1 - found.floor[node]
    return x0 + PAD + found.place[node] * BOX_W, y0 + HEAD + PAD + floor * (BOX_H + GAP_Y) + BOX_H / 2


def _ports(found: Layers) -> dict[tuple[Edge, int], float]:
    """(arrow, 0 where it begins or -1 where it ends) -> how far that is from the middle of its box: side by side on an
    edge of it, in the order of what the arrows come from or go to."""
    sides: dict[tuple[str, bool], list[tuple[Edge, int]]] = {}
    for edge, way in found.ways.items():
        for end in (0, -1):
            sides.setdefault((way[end], (end == 0) != (edge in found.back)), []).append((edge, end))
    out: dict[tuple[Edge, int], float] = {}
    for ports in sides.values():
        ports.sort(key=lambda port: found.place[found.ways[port[0]][1 if port[1] == 0 else -2]])
        step = min(22.0, (BOX_W - 22) / max(1, len(ports) - 1))
        out |= {port: (i - (len(ports) - 1) / 2) * step for i, port in enumerate(ports)}
    return out


def _arrow(points: Sequence[tuple[float, float]], count: int, up: bool) -> str:
    """A curve through the points, from the lower edge of the first box to the upper edge of the last (red: the other
    way)."""
    side = -1 if up else 1
    (x1, y1), (x2, y2) = points[0], points[-1]
    middle = [p for x, y in points[1:-1] for p in ((x, y - side * BOX_H / 2), (x, y + side * BOX_H / 2))]
    line = [(x1, y1 + side * BOX_H / 2), *middle, (x2, y2 - side * BOX_H / 2)]
    path = f"M{line[0][0]:.0f} {line[0][1]:.0f}"
    for (ax, ay), (bx, by) in pairwise(line):
        mid = (ay + by) / 2
        path += f" C{ax:.0f} {mid:.0f} {bx:.0f} {mid:.0f} {bx:.0f} {by:.0f}"
    kind, head = (' class="up"', "up") if up else ("", "down")
    return (
        f'<g{kind}><path class="arrow" d="{path}" marker-end="url(#{head})"/>'
        f'<text class="count" x="{x1:.0f}" y="{line[0][1] + side * 14 + (0 if side > 0 else 6):.0f}"'
        f' text-anchor="middle">{count}</text></g>'
    )


def _box(package: str, room: str, modules: int, rooms: Rooms, x: float, y: float) -> str:
    short = {
        "expertd": "contract",
        "expertd_kernels": "kernels",
        "expertd_server": "server",
        "expertd_client": "client",
        "expertctl": "tools",
    }
    outside = [f"{short[o]} {n}" for (p, r, o), n in sorted(rooms.across.items()) if (p, r) == (package, room)]
    left, top = x - BOX_W / 2, y - BOX_H / 2
    count = f"{modules} module{'s' if modules > 1 else ''}"
    second = f'<text class="small" x="{x:.0f}" y="{y + 21:.0f}" text-anchor="middle">→ {", ".join(outside)}</text>'
    return (
        f'<rect class="box" x="{left:.0f}" y="{top:.0f}" width="{BOX_W}" height="{BOX_H}" rx="5"/>'
        f'<text class="room" x="{x:.0f}" y="{y - 8:.0f}" text-anchor="middle">{escape(room)}</text>'
        f'<text class="small" x="{x:.0f}" y="{y + 7:.0f}" text-anchor="middle">{count}</text>'
        + (second if outside else "")
    )


def _panel(package: str, rooms: Rooms, found: Layers, x0: float, y0: float) -> list[str]:
    width, height = _size(found)
    out = [
        f'<rect class="panel" x="{x0:.0f}" y="{y0:.0f}" width="{width:.0f}" height="{height:.0f}" rx="8"/>',
        f'<text class="package" x="{x0 + 14:.0f}" y="{y0 + 25:.0f}">{package}</text>',
    ]
    ports = _ports(found)
    for (a, b), way in found.ways.items():
        points = [_at(found, node, x0, y0) for node in way]
        points[0] = points[0][0] + ports[(a, b), 0], points[0][1]
        points[-1] = points[-1][0] + ports[(a, b), -1], points[-1][1]
        out.append(_arrow(points, rooms.inside[package][a, b], (a, b) in found.back))
    for room, modules in sorted(rooms.rooms[package].items()):
        out.append(_box(package, room, modules, rooms, *_at(found, room, x0, y0)))
    return out


def draw(rooms: Rooms) -> str:
    """The picture as SVG text."""
    panels = {p: layered(sorted(rooms.rooms[p]), rooms.inside[p]) for p in PACKAGES}
    size = {p: _size(found) for p, found in panels.items()}
    origin, width, height, gap = {}, 0.0, 10.0, 70
    for row in ROWS:
        left = 10.0
        for package in row:
            origin[package] = left, height
            left += size[package][0] + gap
        width = max(width, left - gap + 10)
        height += max(size[p][1] for p in row) + gap
    height += 10 - gap
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}"'
        f' viewBox="0 0 {width:.0f} {height:.0f}">',
        f"<style>{STYLE}</style>",
        "<defs>"
        + "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="{size_}" markerHeight="{size_}"'
            f' orient="auto"><path d="M0 0 8 4 0 8z" fill="{color}"/></marker>'
            for name, color, size_ in (("down", "#789", 7), ("up", "#c00", 6), ("bundle", "#456", 4))
        )
        + "</defs>",
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fff"/>',
    ]
    for package, (x0, y0) in origin.items():
        out += _panel(package, rooms, panels[package], x0, y0)
    for (a, b), n in sorted(rooms.bundles().items()):
        out.append(_bundle(origin[a], size[a], origin[b], size[b], n))
    return "\n".join([*out, "</svg>"]) + "\n"


def _bundle(
    a: tuple[float, float], a_size: tuple[float, float], b: tuple[float, float], b_size: tuple[float, float], count: int
) -> str:
    """The thick arrow from one package to another: straight down where one stands above the other, else slanting."""
    (ax, ay), (bx, by) = a, b
    low, high = max(ax, bx), min(ax + a_size[0], bx + b_size[0])
    if low < high:
        x1 = x2 = low + 30 + 40 * (by - ay > 1.5 * a_size[1])  # an arrow over a row passes beside those between rows
    else:
        x1, x2 = (ax + 60, bx + b_size[0] - 30) if ax > bx else (ax + a_size[0] - 30, bx + 60)
    y1, y2 = ay + a_size[1], by
    return (
        f'<path class="bundle" d="M{x1:.0f} {y1:.0f} L{x2:.0f} {y2:.0f}" marker-end="url(#bundle)"/>'
        f'<text class="bundle-count" x="{(x1 + x2) / 2 + 8:.0f}" y="{(y1 + y2) / 2 - (14 if x1 != x2 else -4):.0f}">'
        f"{count} imports</text>"
    )


def main(argv: Sequence[str] | None = None) -> int:
    target = (sys.argv[1:] if argv is None else list(argv)) or [str(Path(__file__).with_suffix(".svg"))]
    Path(target[0]).write_text(draw(read()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
