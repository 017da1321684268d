"""The generation of an Intel GPU: by its PCI device id where torch tells it, else by its name.  Pure.

Ids: Linux, include/drm/intel/pciids.h (INTEL_LNL_IDS, INTEL_BMG_IDS, INTEL_PTL_IDS, INTEL_WCL_IDS).
"""

from __future__ import annotations

import re

__all__ = ["XE_IDS", "xe_generation"]

_LUNAR_LAKE = frozenset({0x6420, 0x64A0, 0x64B0})
_BATTLEMAGE = frozenset(
    {0xE202, 0xE209, 0xE20B, 0xE20C, 0xE20D, 0xE210, 0xE211, 0xE212, 0xE216, 0xE220, 0xE221, 0xE222, 0xE223}
)
_PANTHER_LAKE = frozenset({*range(0xB080, 0xB088), 0xB08F, 0xB090, 0xB0A0, 0xB0B0})
_WILDCAT_LAKE = frozenset({0xFD80, 0xFD81})

XE_IDS = {"xe2": _LUNAR_LAKE | _BATTLEMAGE, "xe3": _PANTHER_LAKE | _WILDCAT_LAKE}
"""Generation -> PCI device ids."""

_NAMES = {
    "xe3": r"Xe3|Panther|Wildcat|Arc\S* B3\d0\b",
    "xe2": r"Xe2|Lunar|Battlemage|Arc\S* 1[34]0V\b|\bB[567]\d0?\b",
}
_ID_IN_NAME = re.compile(r"\[0x([0-9a-f]{4})\]", re.IGNORECASE)


def xe_generation(name: str, device_id: int = 0) -> str:
    """ "xe2" for Lunar Lake and Battlemage, "xe3" for Panther Lake and Wildcat Lake, "xe" for all others.

    name: as the driver tells it, a product ("Intel(R) Arc(TM) 140V GPU (16GB)") or an id ("Intel(R) Graphics
    [0x64a0]").  device_id: the PCI device id; 0: torch does not tell it.
    """
    if not device_id and (found := _ID_IN_NAME.search(name)):
        device_id = int(found[1], 16)
    by_id = next((generation for generation, ids in XE_IDS.items() if device_id in ids), None)
    return by_id or next((g for g, words in _NAMES.items() if re.search(words, name)), "xe")
