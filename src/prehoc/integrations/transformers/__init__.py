"""Hugging Face transformers: ``sparsify``, ``attach``, ``detach``, ``supports`` and cache helpers."""

from prehoc.integrations.transformers.layers import fork, new_cache
from prehoc.integrations.transformers.session import Session, attach, detach, sparsify
from prehoc.integrations.transformers.support import Support, supports

__all__ = ["Session", "Support", "attach", "detach", "fork", "new_cache", "sparsify", "supports"]
