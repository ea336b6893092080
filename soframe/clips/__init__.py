"""Clips: bounds on the updates of a step, each a formula of updates and gradients."""

from soframe.clips.base import Clip
from soframe.clips.kl import KLClip
from soframe.clips.norm import NormClip

__all__ = ["Clip", "KLClip", "NormClip"]
