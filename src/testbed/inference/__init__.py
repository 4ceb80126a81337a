"""Use a trained model."""

from __future__ import annotations

from testbed.inference.loading import load_model

__all__ = ["load_model"]
