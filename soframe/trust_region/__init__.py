"""How far a step may go."""

from soframe.trust_region.kl_clip import kl_clip_factor

__all__ = ["kl_clip_factor"]
