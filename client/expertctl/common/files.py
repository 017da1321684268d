"""Tensors in files: .npy and .safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

__all__ = ["load_array", "load_tensors", "save_array"]


def load_array(path: Path) -> NDArray[Any]:
    """The array of a .npy file.  numpy writes bfloat16 as two opaque bytes ("V2"); they are read back as bfloat16."""
    try:
        array: NDArray[Any] = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path}: cannot be read as a .npy file: {error}") from None
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.dtype("V2") else array


def save_array(path: Path, array: NDArray[Any]) -> None:
    """Writes a .npy file that every reader of the format understands: bfloat16 as float32, which holds it exactly."""
    np.save(path, array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array)


def load_tensors(path: Path, names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """The tensors `names` of a .safetensors file.  Raises ValueError for a file that is not what it says."""
    try:
        with safe_open(path, framework="np") as file:
            held = sorted(file.keys())
            missing = [name for name in names if name not in held]
            if missing:
                want = f"want {', '.join(names)}; it holds {', '.join(held)}"
                raise ValueError(f"{path}: got no tensor {', '.join(missing)}, {want}")
            return {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError, AttributeError) as error:  # AttributeError: a dtype that numpy does not know
        raise ValueError(f"{path}: cannot be read as a .safetensors file: {error}") from None
