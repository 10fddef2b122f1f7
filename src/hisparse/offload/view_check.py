"""Whether a cache tensor is what its layout says: shape and strides against the declared axes and the family.

Nothing is inferred from sizes: a model with two KV heads, or as many heads as tokens in a block, has shapes that fit
several layouts. The declaration says what an axis means, the strides say in what order the axes lie in memory, and
both must agree with the family. Axes with one entry have no order, so they are left out.
"""

from hisparse.errors import LayoutError
from hisparse.offload.layout import Family, KVGeometry, TensorView

_AXES = "BKTHD"
_MAX_BYTES = 2**63 - 1


def check_view(view: TensorView, geometry: KVGeometry, num_heads: int) -> None:
    """Raises `LayoutError` unless the view holds blocks of `geometry` with `num_heads` heads, each byte once."""
    _check_declaration(view, geometry.family)
    _check_sizes(view, geometry, num_heads)
    _check_strides(view)
    _check_order(view, geometry.family)


def _check_declaration(view: TensorView, family: Family) -> None:
    declared = view.declared
    if not declared:
        raise LayoutError("the tensor's axes are not declared, and a shape alone does not say what they mean")
    if set(declared) - set(_AXES) or len(set(declared)) != len(declared):
        raise LayoutError(f"{declared!r} is no layout: name each axis once, with the letters {_AXES}")
    if not len(view.shape) == len(view.strides_bytes) == len(declared):
        raise LayoutError(
            f"layout {declared} has {len(declared)} axes, shape {view.shape} and strides {view.strides_bytes} do not"
        )
    optional = {"packed": "K", "split": "", "latent": "KH"}[family.value.partition("-")[0]]
    missing = set(_AXES) - set(declared) - set(optional)
    if missing:
        raise LayoutError(f"layout {declared} lacks {''.join(sorted(missing))}, which a {family.value} page has")


def _check_sizes(view: TensorView, geometry: KVGeometry, num_heads: int) -> None:
    size = dict(zip(view.declared, view.shape, strict=True))
    if min(view.shape) < 1 or view.element_bytes < 1:
        raise LayoutError(f"shape {view.shape} with elements of {view.element_bytes} bytes holds nothing")
    row_bytes = geometry.head_bytes * (1 if "K" in size else geometry.num_kinds)
    expected = {"K": (geometry.num_kinds, "kinds"), "T": (geometry.block_tokens, "tokens"), "H": (num_heads, "heads")}
    for axis, (number, noun) in expected.items():
        if size.get(axis, number) != number:
            found = f"{view.declared} {view.shape} has {size[axis]} entries"
            raise LayoutError(f"axis {axis} of {found}, not {number} {noun}")
    if size["D"] * view.element_bytes != row_bytes:
        raise LayoutError(
            f"axis D of {view.declared} {view.shape} has {size['D']} x {view.element_bytes} bytes, not {row_bytes}"
        )


def _check_strides(view: TensorView) -> None:
    """Bytes of different entries are different: each axis steps over all that lies within it."""
    steps = sorted(
        (stride, size, axis)
        for stride, size, axis in zip(view.strides_bytes, view.shape, view.declared, strict=True)
        if size > 1
    )
    extent = view.element_bytes
    for stride, size, axis in steps:
        if stride < extent:
            raise LayoutError(
                f"axis {axis} of {view.declared} {view.shape} steps by {stride} bytes, over {extent} that lie within "
                f"it: entries would overlap (strides {view.strides_bytes})"
            )
        extent += stride * (size - 1)
    if extent > _MAX_BYTES:
        raise LayoutError(f"a tensor of {extent} bytes has offsets that 64 bits do not hold")
    inner = view.strides_bytes[view.declared.index("D")]
    if view.shape[view.declared.index("D")] > 1 and inner != view.element_bytes:
        raise LayoutError(f"elements of {view.element_bytes} bytes lie {inner} bytes apart: heads must be contiguous")


def _check_order(view: TensorView, family: Family) -> None:
    """Within a block, the axes lie in memory in the order of the family."""
    stride = dict(zip(view.declared, view.strides_bytes, strict=True))
    size = dict(zip(view.declared, view.shape, strict=True))
    wanted = [axis for axis in family.axes if size.get(axis, 1) > 1 and axis != "D"]
    found = sorted(wanted, key=lambda axis: -stride[axis])
    if found != wanted:
        raise LayoutError(
            f"{view.declared} {view.shape} with strides {view.strides_bytes} lies in memory as {''.join(found)}D, "
            f"a {family.value} page as {''.join(wanted)}D"
        )
