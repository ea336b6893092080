"""Communication: backends, packing and fusion. Transport is torch.distributed's."""

from soframe.comm.base import Backend, Handle, SingleProcess
from soframe.comm.distributed import TorchDistributed, leave_gradients
from soframe.comm.packing import pack_triangle, unpack_triangle
from soframe.comm.recording import Recording

__all__ = [
    "Backend",
    "Handle",
    "Recording",
    "SingleProcess",
    "TorchDistributed",
    "leave_gradients",
    "pack_triangle",
    "unpack_triangle",
]
