"""Model surgery: functions that change what a model ends in, how large its embeddings are, and how it is saved."""

from st_magnitude.surgery.grad_scale import attach_grad_scale, grad_scale
from st_magnitude.surgery.normalize import (
    add_normalize,
    cut_init,
    export,
    load,
    prepare,
    rescale_output,
    strip_normalize,
)

__all__ = [
    "add_normalize",
    "attach_grad_scale",
    "cut_init",
    "export",
    "grad_scale",
    "load",
    "prepare",
    "rescale_output",
    "strip_normalize",
]
