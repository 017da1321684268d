"""What a reader is: two functions that turn one projection of one expert into canonical parts.

    layout(unit) -> Layout   what the part will be, from shapes, dtypes and the configuration alone: no weight is read
    read(unit)   -> Part     the tensors of that part

A *unit* is one projection of ONE expert: "gate", "up" or "down" where the checkpoint stores them apart, "gate_up" where
one tensor holds both.  In fused checkpoints ([E, ...] tensors) the unit's tensors are already cut at the expert, so a
reader never sees the expert dimension.  Finding the layers, cutting experts, stacking them, concatenating gate and up,
de-interleaving rows, widening what does not fit together and checking for NaN is done once, in assembly.py.

CONTRIBUTING.md lists the places to touch for a new reader.  One module may serve several formats.  A marker of a format
that is outside of quantization_config and compression_config is read in quant_config.py: readers see `unit.quant` only.

Rules: every error is a CheckpointError that names the tensor (unit.error(...) does).  Never trust a shape: check it
with unit.expect(...) before computing.  Return tensors in the types of canonical.QuantTensor, without the leading E.
Nothing that `read` returns may alias something that is written to later; views of what unit.read(...) gave are fine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from expertd_kernels.checkpoint.errors import CheckpointError
from expertd_kernels.weights.scheme import ActivationQuant, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from expertd_kernels.checkpoint.repack import Repacked
    from expertd_kernels.checkpoint.tensors import Stored

__all__ = ["Layout", "Part", "Reader", "Unit"]


@dataclass(eq=False)
class Unit:
    """One projection of one expert, as it lies in the checkpoint.  Readers do not change it.

    name        "model.layers.1.mlp.experts.0.gate_proj", or "model.layers.1.mlp.experts.gate_up_proj[0]" of a fused one
    projection  "gate", "up", "down" or "gate_up"
    n, k        logical rows (outputs) and columns (inputs) that the model's config asks for; gate_up: n = 2I.
                0 where the config does not say (then the tensors decide alone)
    tensors     what is left of the name -> lazy tensor.  Per expert: "weight", "weight_scale", "qweight", "bias", ...
                Fused: "" for the bare `gate_up_proj`, else without the joining "_" or ".": "blocks", "scales", "bias",
                "weight_scale", ...; shapes without the leading E where the tensor has one
    siblings    other tensors directly below `experts.`, by name, cut at this expert where their leading size is E:
                {"gate_up_proj_scale_inv": ...} of the fp8 hybrid
    fused       whether it is cut out of [E, ...] tensors
    transposed  whether fused matrices lie input-first ([E, K, N]), by the shape of their partner or by the family's
                custom: decides only where this one's shape cannot
    interleaved whether rows of gate_up alternate gate, up, gate, up (assembly undoes it; a reader rarely cares)
    quant       the quantization config of config.json (or of the file beside it), {} if there is none
    layout      what layout() said of this unit (or of one just like it); set when read() is called
    overrides   what the quantization config says of this very projection (GPTQ `dynamic`, auto-round `extra_config`)
    """

    name: str
    layer: int
    expert: int
    projection: str
    n: int
    k: int
    tensors: Mapping[str, Stored]
    siblings: Mapping[str, Stored] = field(default_factory=dict)
    fused: bool = False
    transposed: bool = False
    interleaved: bool = False
    quant: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    layout: Layout | None = None

    def has(self, suffix: str) -> bool:
        return suffix in self.tensors

    def stored(self, suffix: str) -> Stored:
        """The lazy tensor called `suffix`: dtype ("I32"), shape, name, file; reads nothing."""
        found = self.tensors.get(suffix)
        if found is None:
            have = ", ".join(sorted(self.tensors)) or "nothing"
            raise CheckpointError(f"{self.name}: tensor {suffix!r} is missing; the checkpoint has {have}")
        return found

    def expect(self, suffix: str, shape: tuple[int, ...] | None = None, *dtypes: str) -> Stored:
        """stored(suffix), refused with a sentence unless it has this shape and one of these safetensors dtypes."""
        t = self.stored(suffix)
        if dtypes and t.dtype not in dtypes:
            raise CheckpointError(f"{t.name}: dtype {t.dtype}, want {' or '.join(dtypes)}")
        if shape is not None and t.shape != shape:
            raise CheckpointError(f"{t.name}: shape {list(t.shape)}, want {list(shape)}")
        return t

    def read(self, suffix: str) -> Tensor:
        """The tensor's values: contiguous, the dtype's torch type; F8_E8M0 comes as uint8.  Do not write to it."""
        return self.stored(suffix).read()

    def needed(self) -> Iterator[Stored]:
        """Every tensor (or cut of one) that may be read for this unit."""
        yield from self.tensors.values()
        yield from self.siblings.values()

    def setting(self, key: str, default: Any = None) -> Any:
        """A key of the quantization config, the override for this projection first."""
        value = self.overrides.get(key, self.quant.get(key, default))
        return default if value is None else value

    def flag(self, key: str, default: bool | None = None) -> bool | None:
        """setting(key), which must be true or false where it is there."""
        value = self.setting(key, default)
        if value is not None and type(value) is not bool:
            raise self.error(f"{key} is {value!r:.80} in the quantization config", "true or false")
        return value

    def error(self, got: str, want: str = "", suffix: str | None = None) -> CheckpointError:
        """A CheckpointError about this unit, or about one tensor of it; to be raised."""
        own = None if suffix is None else self.tensors.get(suffix)
        beside = None if suffix is None else self.siblings.get(suffix)
        subject = own.name if own is not None else self.name if beside is None else f"{self.name}, {beside.name}"
        return CheckpointError(f"{subject}: {got}" + (f"; want {want}" if want else ""))


@dataclass(frozen=True)
class Layout:
    """What `read` will return for a unit.

    scheme       of the codes, [n, k] logical, as one segment
    n, k         logical rows and columns as the tensors have them (assembly compares them with the config)
    bias         whether a bias comes with it
    columns      [k] int32 activation order (see order.py), None = natural
    factors      [k] f32 what input columns are multiplied by (AWQ's pre_quant_scale), None = ones.  For these two alone
                 layout may read tensors: whether projections share them decides how a matrix is stored
    input_scale  whether a static activation scale comes with it
    activation   how the checkpoint wants activations rounded
    notes        sentences for the user
    """

    scheme: Scheme
    n: int
    k: int
    bias: bool = False
    columns: Tensor | None = field(default=None, compare=False)
    factors: Tensor | None = field(default=None, compare=False)
    input_scale: bool = False
    activation: ActivationQuant = ActivationQuant.NONE
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Part:
    """One projection of one expert in canonical form; any strides.

    codes         [n, k] int8 | e4m3 | bf16 | f16 | f32, or [n, ceil(k/2)] u8 low nibble = even k.  Integer words that
                  hold the same bytes are fine too ([n, k/8] int32, little-endian): assembly copies bytes.
                  A Stored (unit.stored(...), unread) whose bytes are the canonical ones is best: they go from the file
                  into the layer's matrix without a stop.  A Repacked makes them there
    scales        [*scheme.scale_shape(n, k)] in the scheme's scale type (e8m0 as u8); None if unquantized
    zeros         as scales, u8 for int4, int8 for int8; None = symmetric
    global_scale  f32, one number (any shape with one element), a MULTIPLIER; for gate_up also two (gate, up).  f64
                  where it is the reciprocal of a stored divisor: assembly rounds it to f32 and keeps it as global_exact
    columns       [k] int32: code column j multiplies input column columns[j]; None = natural order
    factors       [k] f32: what input columns are multiplied by; None = ones
    bias          [n], any float type
    input_scale   f32, one number, a MULTIPLIER: x ~ q * input_scale
    """

    codes: Tensor | Stored | Repacked
    scales: Tensor | None = None
    zeros: Tensor | None = None
    global_scale: Tensor | None = None
    columns: Tensor | None = None
    factors: Tensor | None = None
    bias: Tensor | None = None
    input_scale: Tensor | None = None


class Reader(Protocol):
    """The shape of a module in readers/.

    layout(unit) is asked once for all units that look alike (names, dtypes, shapes of their tensors), and of each unit
    that has a `g_idx` or a `pre_quant_scale`.  A module may define `may_be_ordered(unit) -> bool` to say that a g_idx
    needs no look.
    """

    def layout(self, unit: Unit) -> Layout: ...

    def read(self, unit: Unit) -> Part: ...
